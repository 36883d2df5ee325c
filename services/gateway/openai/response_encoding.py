"""What answers look like: the JSON of chat and of plain completions, whole and in pieces.

A piece is put together from text that is the same for the whole stream; only what is new is encoded for each token.
What is kept of rated tokens for an answer that is sent whole is their JSON already: as objects it takes three times as
much, and there may be a thousand texts.
"""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

from neuronpipe.plans.plan.memory_budget import REQUESTS_BYTES
from neuronpipe.protocol.messages.client import Finished, Likely, Token
from neuronpipe.services.gateway.http.api_errors import ApiError

FINISH_REASONS = {"length": "length", "context": "length", "stop": "stop", "end": "stop"}
DONE = b"data: [DONE]\n\n"
MAX_LOGPROB_CHARACTERS = (
    REQUESTS_BYTES // 8
)  # which response_sending.py counts four times, so that half is left to others

EncodedLogprobs = tuple[str, ...]
"""What is said of one rated token, as JSON: an item for each of a form's lists."""


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


class ResponseEncoder(ABC):
    """One answer's frame. counts: every chunk of a stream has `usage`, null but for the last. rates: tokens are shown
    with the logarithms of their probabilities, but for end tokens, which are no part of the text."""

    kind: str
    chunk_kind: str
    prefix: str
    _empty_content: str
    _logprob_keys: tuple[str, ...]  # of ratings, by their names
    _logprob_suffix = ""  # what else stands there
    done = DONE  # after the last chunk of a stream

    def __init__(
        self, model: str, fingerprint: str, *, with_usage: bool, with_logprobs: bool, end_tokens: Collection[int]
    ) -> None:
        self._id = f"{self.prefix}-{os.urandom(12).hex()}"
        self._head = {"created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        self._with_usage, self._with_logprobs, self._end_tokens = with_usage, with_logprobs, end_tokens
        self._logprobs: dict[int, list[EncodedLogprobs]] = {}
        self.logprob_characters = 0
        self._characters: dict[int, int] = {}  # characters of each text so far
        opening = json.dumps({"id": self._id, "object": self.chunk_kind, **self._head})[:-1]
        self._opening = f'data: {opening}, "choices": [{{"index": '
        self._closing = ('], "usage": null}' if with_usage else "]}") + "\n\n"

    def end_also_with(self, tokens: Sequence[int]) -> None:
        """These tokens end a text, too."""
        self._end_tokens = (*self._end_tokens, *tokens)

    # ---- in pieces -------------------------------------------------------------------------------------------
    def first(self, number: int) -> bytes:
        """Before the first piece of a text."""
        return b""

    def piece(self, number: int, token: Token) -> bytes:
        """What a token adds; nothing while a character is incomplete."""
        if not self._with_logprobs:
            return self._event(number, self._text_content(token.text), "null", "null") if token.text else b""
        rated = token.token not in self._end_tokens
        if not rated and not token.text:
            return b""
        ratings = [self._encode_logprobs(token, self._text_offset(number, token))] if rated else []
        return self._event(number, self._text_content(token.text), self._logprob_lists(ratings), "null")

    def last(self, number: int, finished: Finished) -> bytes:
        """The end of a text."""
        return self._event(number, self._empty_content, "null", f'"{self._reason(finished)}"')

    def usage_chunk(self, total: dict[str, int]) -> bytes:
        """The last chunk of a stream, when token counts were asked for."""
        content = {"id": self._id, "object": self.chunk_kind, **self._head, "choices": [], "usage": total}
        return f"data: {json.dumps(content)}\n\n".encode() if self._with_usage else b""

    def error_chunk(self, problem: ApiError) -> bytes:
        """The last chunk of a stream that ends with an error."""
        return b"data: " + problem.body() + b"\n\n"

    def _event(self, number: int, content: str, ratings: str, reason: str) -> bytes:
        choice = f'{number}, {content}, "logprobs": {ratings}, "finish_reason": {reason}}}'
        return f"{self._opening}{choice}{self._closing}".encode()

    # ---- in one piece ----------------------------------------------------------------------------------------
    def keep_logprobs(self, number: int, token: Token) -> None:
        """A token of an answer that is sent whole. Raises Problem when the answer becomes too large."""
        if not self._with_logprobs or token.token in self._end_tokens:
            return
        rating = self._encode_logprobs(token, self._text_offset(number, token))
        self._logprobs.setdefault(number, []).append(rating)
        self._count_logprobs(rating)

    def _count_logprobs(self, rating: EncodedLogprobs) -> None:
        """It is kept for the answer. Raises Problem when that becomes too large."""
        self.logprob_characters += sum(map(len, rating))
        if self.logprob_characters > MAX_LOGPROB_CHARACTERS:
            said = "logprobs: the answer is too large to be sent whole; ask for a stream, fewer texts or fewer tokens"
            raise ApiError(400, "answer_too_large", said, param="logprobs")

    def whole(self, sent: Sequence[tuple[int, Finished]], total: dict[str, int]) -> bytes:
        """The answer: texts by their numbers, in the order in which they are sent."""
        choices = []
        for index, (number, one) in enumerate(sent):
            ratings = self._logprob_lists(self._logprobs.pop(number, [])) if self._with_logprobs else "null"
            choice = {"index": index, **self._content(one), "finish_reason": self._reason(one)}
            choices.append(f'{json.dumps(choice)[:-1]}, "logprobs": {ratings}}}')
        head = json.dumps({"id": self._id, "object": self.kind, **self._head, "usage": total})[:-1]
        return f'{head}, "choices": [{", ".join(choices)}]}}'.encode()

    def _reason(self, finished: Finished) -> str:
        """Why the text ended."""
        return FINISH_REASONS[finished.reason]

    def _logprob_lists(self, ratings: Sequence[EncodedLogprobs]) -> str:
        columns = zip(*ratings, strict=True) if ratings else ((),) * len(self._logprob_keys)
        lists = (f'"{name}": [{", ".join(items)}]' for name, items in zip(self._logprob_keys, columns, strict=True))
        return f"{{{', '.join(lists)}{self._logprob_suffix}}}"

    def _text_offset(self, number: int, token: Token) -> int:
        """Where the token's text begins, in characters of the answer."""
        shown = self._characters.get(number, 0)
        self._characters[number] = shown + len(token.text)
        return shown

    # ---- what differs ----------------------------------------------------------------------------------------
    @abstractmethod
    def _text_content(self, text: str) -> str: ...

    @abstractmethod
    def _content(self, finished: Finished) -> dict[str, Any]: ...

    @abstractmethod
    def _encode_logprobs(self, token: Token, offset: int) -> EncodedLogprobs:
        """offset: where the token's text begins, in characters of the answer."""


class ChatEncoder(ResponseEncoder):
    """`/v1/chat/completions`."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    _empty_content = '"delta": {}'
    _logprob_keys, _logprob_suffix = ("content",), ', "refusal": null'

    def first(self, number: int) -> bytes:
        """Who speaks."""
        return self._event(number, '"delta": {"role": "assistant", "content": ""}', "null", "null")

    def _text_content(self, text: str) -> str:
        return f'"delta": {{"content": {json.dumps(text)}}}'

    def _content(self, finished: Finished) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": finished.text, "refusal": None}}

    def _encode_logprobs(self, token: Token, offset: int) -> EncodedLogprobs:
        top = [_logprob_entry(one.piece, one.logprob) for one in _top_with_sampled(token)] if token.top else []
        return (json.dumps({**_logprob_entry(token.piece, token.logprob), "top_logprobs": top}),)


def _top_with_sampled(token: Token) -> Sequence[Likely]:
    """The likeliest tokens, and after them the one that was sampled where it is none of these."""
    if token.logprob is None or any(one.token == token.token for one in token.top):
        return token.top
    return (*token.top, Likely(token=token.token, piece=token.piece, logprob=token.logprob))


def _logprob_entry(piece: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": piece.decode(errors="replace"), "logprob": logprob, "bytes": list(piece)}


class CompletionEncoder(ResponseEncoder):
    """`/v1/completions`."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"
    _empty_content = '"text": ""'
    _logprob_keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

    def _text_content(self, text: str) -> str:
        return f'"text": {json.dumps(text)}'

    def _content(self, finished: Finished) -> dict[str, Any]:
        return {"text": finished.text}

    def _encode_logprobs(self, token: Token, offset: int) -> EncodedLogprobs:
        top = {_token_text(one.piece): one.logprob for one in _top_with_sampled(token)}
        return tuple(map(json.dumps, (_token_text(token.piece), token.logprob, top, offset)))


def _token_text(piece: bytes) -> str:
    """A token as text; one that is no whole characters by its bytes, so that no two have one name."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
