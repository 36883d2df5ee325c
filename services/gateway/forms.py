"""What answers look like: the JSON of chat and of plain completions, whole and in pieces.

A piece is put together from text that is the same for the whole stream; only what is new is encoded for each token.
"""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

from neuronpipe.protocol.messages.client import Finished, Likely, Token

REASONS = {"length": "length", "context": "length", "stop": "stop", "end": "stop"}
DONE = b"data: [DONE]\n\n"


def usage(finished: Sequence[Finished], texts_per_prompt: int) -> dict[str, Any]:
    """Token counts over all texts, a prompt counted once however many texts continue it. `cached_tokens`, those whose
    keys and values were there already, are of the same prompts."""
    counted = finished[::texts_per_prompt]
    prompts = sum(one.prompt_tokens for one in counted)
    made = sum(one.tokens for one in finished)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": made,
        "total_tokens": prompts + made,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in counted)},
    }


class Form(ABC):
    """One answer's frame. counts: every chunk of a stream has `usage`, null but for the last. rates: tokens are shown
    with the logarithms of their probabilities, but for end tokens, which are no part of the text."""

    kind: str
    chunk_kind: str
    prefix: str
    _nothing: str

    def __init__(self, model: str, fingerprint: str, *, counts: bool, rates: bool, end_tokens: Collection[int]) -> None:
        self._id = f"{self.prefix}-{os.urandom(12).hex()}"
        self._head = {"created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        self._counts, self._rates, self._end_tokens = counts, rates, end_tokens
        self._kept: dict[int, list[Token]] = {}
        self._shown: dict[int, int] = {}  # characters of each text so far
        opening = json.dumps({"id": self._id, "object": self.chunk_kind, **self._head})[:-1]
        self._opening = f'data: {opening}, "choices": [{{"index": '
        self._closing = ('], "usage": null}' if counts else "]}") + "\n\n"

    # ---- in pieces -------------------------------------------------------------------------------------------
    def first(self, number: int) -> bytes:
        """Before the first piece of a text."""
        return b""

    def piece(self, number: int, token: Token) -> bytes:
        """What a token adds; nothing while a character is incomplete."""
        if not self._rates:
            return self._event(number, self._addition(token.text), "null", "null") if token.text else b""
        rated = [] if token.token in self._end_tokens else [token]
        if not rated and not token.text:
            return b""
        shown = self._shown.get(number, 0)
        self._shown[number] = shown + len(token.text)
        ratings = json.dumps(self._ratings(rated, shown))
        return self._event(number, self._addition(token.text), ratings, "null")

    def last(self, number: int, finished: Finished) -> bytes:
        """The end of a text."""
        return self._event(number, self._nothing, "null", f'"{REASONS[finished.reason]}"')

    def counted(self, total: dict[str, int]) -> bytes:
        """The last chunk of a stream, when token counts were asked for."""
        content = {"id": self._id, "object": self.chunk_kind, **self._head, "choices": [], "usage": total}
        return f"data: {json.dumps(content)}\n\n".encode() if self._counts else b""

    def _event(self, number: int, content: str, ratings: str, reason: str) -> bytes:
        choice = f'{number}, {content}, "logprobs": {ratings}, "finish_reason": {reason}}}'
        return f"{self._opening}{choice}{self._closing}".encode()

    # ---- in one piece ----------------------------------------------------------------------------------------
    def keep(self, number: int, token: Token) -> None:
        """A token of an answer that is sent whole."""
        if self._rates and token.token not in self._end_tokens:
            self._kept.setdefault(number, []).append(token)

    def whole(self, finished: Sequence[Finished], total: dict[str, int]) -> bytes:
        """The answer."""
        choices = [
            {
                "index": number,
                **self._content(one),
                "logprobs": self._ratings(self._kept.get(number, []), 0) if self._rates else None,
                "finish_reason": REASONS[one.reason],
            }
            for number, one in enumerate(finished)
        ]
        content = {"id": self._id, "object": self.kind, **self._head, "choices": choices, "usage": total}
        return json.dumps(content).encode()

    # ---- what differs ----------------------------------------------------------------------------------------
    @abstractmethod
    def _addition(self, text: str) -> str: ...

    @abstractmethod
    def _content(self, finished: Finished) -> dict[str, Any]: ...

    @abstractmethod
    def _ratings(self, tokens: Sequence[Token], offset: int) -> dict[str, Any]:
        """offset: where the text of these tokens begins, in characters of the answer."""


class ChatForm(Form):
    """`/v1/chat/completions`."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    _nothing = '"delta": {}'

    def first(self, number: int) -> bytes:
        """Who speaks."""
        return self._event(number, '"delta": {"role": "assistant", "content": ""}', "null", "null")

    def _addition(self, text: str) -> str:
        return f'"delta": {{"content": {json.dumps(text)}}}'

    def _content(self, finished: Finished) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": finished.text, "refusal": None}}

    def _ratings(self, tokens: Sequence[Token], offset: int) -> dict[str, Any]:
        entries = [
            {
                **_entry(token.piece, token.logprob),
                "top_logprobs": [_entry(one.piece, one.logprob) for one in _with_itself(token)] if token.top else [],
            }
            for token in tokens
        ]
        return {"content": entries, "refusal": None}


def _with_itself(token: Token) -> Sequence[Likely]:
    """The likeliest tokens, and after them the one that was drawn where it is none of these."""
    if token.logprob is None or any(one.token == token.token for one in token.top):
        return token.top
    return (*token.top, Likely(token=token.token, piece=token.piece, logprob=token.logprob))


def _entry(piece: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": piece.decode(errors="replace"), "logprob": logprob, "bytes": list(piece)}


class TextForm(Form):
    """`/v1/completions`."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"
    _nothing = '"text": ""'

    def _addition(self, text: str) -> str:
        return f'"text": {json.dumps(text)}'

    def _content(self, finished: Finished) -> dict[str, Any]:
        return {"text": finished.text}

    def _ratings(self, tokens: Sequence[Token], offset: int) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        return {
            "tokens": [_name(token.piece) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{_name(one.piece): one.logprob for one in _with_itself(token)} for token in tokens],
            "text_offset": offsets,
        }


def _name(piece: bytes) -> str:
    """A token as text; one that is no whole characters by its bytes, so that no two have one name."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
