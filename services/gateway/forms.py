"""What answers look like: the JSON of chat and of plain completions, whole and in pieces.

A piece is put together from text that is the same for the whole stream; only what is new is encoded for each token.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import Any

from neuronpipe.protocol.messages.client import Finished

REASONS = {"length": "length", "context": "length", "stop": "stop", "end": "stop"}
DONE = b"data: [DONE]\n\n"


def usage(finished: Sequence[Finished], texts_per_prompt: int) -> dict[str, int]:
    """Token counts over all texts, a prompt counted once however many texts continue it."""
    prompts = sum(one.prompt_tokens for one in finished[::texts_per_prompt])
    made = sum(one.tokens for one in finished)
    return {"prompt_tokens": prompts, "completion_tokens": made, "total_tokens": prompts + made}


class Form:
    """One answer's frame. `counts`: every chunk of a stream has `usage`, null but for the last."""

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(self, model: str, fingerprint: str, *, counts: bool) -> None:
        self._id = f"{self.prefix}-{os.urandom(12).hex()}"
        self._head = {"created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        self._counts = counts
        opening = json.dumps({"id": self._id, "object": self.chunk_kind, **self._head})[:-1]
        self._opening = f'data: {opening}, "choices": ['
        self._closing = ('], "usage": null}' if counts else "]}") + "\n\n"

    def _event(self, choice: str) -> bytes:
        return f"{self._opening}{choice}{self._closing}".encode()

    def first(self, number: int) -> bytes:
        """Before the first piece of a text."""
        return b""

    def piece(self, number: int, text: str) -> bytes:
        """Some more text."""
        raise NotImplementedError

    def last(self, number: int, finished: Finished) -> bytes:
        """The end of a text."""
        raise NotImplementedError

    def counted(self, total: dict[str, int]) -> bytes:
        """The last chunk of a stream, when token counts were asked for."""
        content = {"id": self._id, "object": self.chunk_kind, **self._head, "choices": [], "usage": total}
        return f"data: {json.dumps(content)}\n\n".encode() if self._counts else b""

    def whole(self, finished: Sequence[Finished], total: dict[str, int]) -> bytes:
        """The answer in one piece."""
        choices = [
            {"index": number, **self._content(one), "logprobs": None, "finish_reason": REASONS[one.reason]}
            for number, one in enumerate(finished)
        ]
        content = {"id": self._id, "object": self.kind, **self._head, "choices": choices, "usage": total}
        return json.dumps(content).encode()

    def _content(self, finished: Finished) -> dict[str, Any]:
        raise NotImplementedError


class ChatForm(Form):
    """`/v1/chat/completions`."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def first(self, number: int) -> bytes:
        """Who speaks."""
        delta = '{"role": "assistant", "content": ""}'
        return self._event(f'{{"index": {number}, "delta": {delta}, "logprobs": null, "finish_reason": null}}')

    def piece(self, number: int, text: str) -> bytes:
        """Some more text."""
        delta = f'{{"content": {json.dumps(text)}}}'
        return self._event(f'{{"index": {number}, "delta": {delta}, "logprobs": null, "finish_reason": null}}')

    def last(self, number: int, finished: Finished) -> bytes:
        """Why the text ends."""
        reason = REASONS[finished.reason]
        return self._event(f'{{"index": {number}, "delta": {{}}, "logprobs": null, "finish_reason": "{reason}"}}')

    def _content(self, finished: Finished) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": finished.text, "refusal": None}}


class TextForm(Form):
    """`/v1/completions`."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def piece(self, number: int, text: str) -> bytes:
        """Some more text."""
        return self._event(
            f'{{"index": {number}, "text": {json.dumps(text)}, "logprobs": null, "finish_reason": null}}'
        )

    def last(self, number: int, finished: Finished) -> bytes:
        """Why the text ends."""
        reason = REASONS[finished.reason]
        return self._event(f'{{"index": {number}, "text": "", "logprobs": null, "finish_reason": "{reason}"}}')

    def _content(self, finished: Finished) -> dict[str, Any]:
        return {"text": finished.text}
