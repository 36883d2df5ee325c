"""Encoding responses: the JSON of chat and plain completions, sent whole or as a stream.

The chunks of a stream are assembled from strings that are encoded once per stream; only the new text is encoded for
each token. For a response that is sent whole, the log-probabilities are stored as encoded JSON: as objects they take
three times as much memory, and a request may have a thousand sequences.
"""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

from neuronpipe.plans.plan.memory_budget import REQUESTS_BYTES
from neuronpipe.protocol.messages.client import Accepted, Finished, Likely, Token
from neuronpipe.services.gateway.http.api_errors import ApiError

FINISH_REASONS = {"length": "length", "context": "length", "stop": "stop", "end": "stop"}
DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"  # a comment of server-sent events, which clients ignore
MAX_LOGPROB_CHARACTERS = REQUESTS_BYTES // 8
"""response_sending.py counts four copies of them, which leaves half of the memory account to other requests."""

EncodedLogprobs = tuple[str, ...]
"""The JSON of one token's log-probabilities: an item for each of an encoder's lists."""


def usage(finished: Sequence[Finished], sequences_per_prompt: int) -> dict[str, Any]:
    """Return the token counts of a request. A prompt counts once, however many sequences continue it."""
    first_of_prompts = finished[::sequences_per_prompt]
    prompt_tokens = sum(sequence.prompt_tokens for sequence in first_of_prompts)
    completion_tokens = sum(sequence.tokens for sequence in finished)
    accepted_tokens = sum(sequence.accepted_tokens for sequence in finished)
    drafted_tokens = sum(sequence.drafted_tokens for sequence in finished)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(sequence.cached_tokens for sequence in first_of_prompts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted_tokens,
            "rejected_prediction_tokens": drafted_tokens - accepted_tokens,
        },
    }


def typed_event(name: str, /, **fields: Any) -> bytes:
    """Return a server-sent event whose type is also in its data."""
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()


class ResponseEncoder(ABC):
    """The base of encoders, each of which encodes one response of an endpoint.

    with_usage: every chunk of a stream has `usage`, which is null except in the last chunk
    with_logprobs: tokens have log-probabilities, except end tokens, which are not part of the text
    """

    kind: str
    chunk_kind: str
    prefix: str
    _empty_content: str
    _logprob_keys: tuple[str, ...]  # the names of the lists in `logprobs`
    _logprob_suffix = ""  # JSON after these lists
    media_type = b"text/event-stream; charset=utf-8"  # of a stream
    done = DONE  # sent after the last chunk of a stream
    keep_alive = COMMENT  # sent while there is nothing else to send

    def __init__(
        self, model: str, fingerprint: str, *, with_usage: bool, with_logprobs: bool, end_tokens: Collection[int]
    ) -> None:
        self._id = f"{self.prefix}{os.urandom(12).hex()}"
        self._head = {"created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        self._with_usage, self._with_logprobs, self._end_tokens = with_usage, with_logprobs, end_tokens
        self._logprobs: dict[int, list[EncodedLogprobs]] = {}
        self.logprob_characters = 0
        self._characters: dict[int, int] = {}  # length of each sequence's text so far
        opening = json.dumps({"id": self._id, "object": self.chunk_kind, **self._head})[:-1]
        self._opening = f'data: {opening}, "choices": [{{"index": '
        self._closing = ('], "usage": null}' if with_usage else "]}") + "\n\n"

    def end_also_with(self, tokens: Sequence[int]) -> None:
        """Add end tokens; they have no log-probabilities."""
        self._end_tokens = (*self._end_tokens, *tokens)

    def acquired(self) -> None:  # noqa: B027
        """Note that the model has a run, which the request now uses; by default nothing follows from that."""

    # ---- streams ---------------------------------------------------------------------------------------------
    def accepted(self, number: int, message: Accepted) -> bytes:
        """Return the events that are sent once a sequence is accepted; by default there are none."""
        return b""

    def first(self, number: int) -> bytes:
        """Return the chunk before a sequence's first token; by default there is none."""
        return b""

    def piece(self, number: int, token: Token) -> bytes:
        """Return the chunk of a token; empty if the token has neither text nor log-probabilities to send."""
        if not self._with_logprobs:
            return self._event(number, self._text_content(token.text), "null", "null") if token.text else b""
        rated = token.token not in self._end_tokens
        if not rated and not token.text:
            return b""
        logprobs = [self._encode_logprobs(token, self._text_offset(number, token))] if rated else []
        return self._event(number, self._text_content(token.text), self._logprob_lists(logprobs), "null")

    def last(self, number: int, finished: Finished) -> bytes:
        return self._event(number, self._empty_content, "null", f'"{self._reason(finished)}"')

    def usage_chunk(self, total: dict[str, int]) -> bytes:
        """Return the chunk with the token counts; empty if they were not requested."""
        content = {"id": self._id, "object": self.chunk_kind, **self._head, "choices": [], "usage": total}
        return f"data: {json.dumps(content)}\n\n".encode() if self._with_usage else b""

    def error_chunk(self, problem: ApiError) -> bytes:
        """Return the last chunk of a stream that ends with an error."""
        return b"data: " + problem.body() + b"\n\n"

    def _event(self, number: int, content: str, logprobs: str, reason: str) -> bytes:
        choice = f'{number}, {content}, "logprobs": {logprobs}, "finish_reason": {reason}}}'
        return f"{self._opening}{choice}{self._closing}".encode()

    # ---- whole responses -------------------------------------------------------------------------------------
    def take(self, number: int, token: Token) -> None:
        """Take a token of a response that is sent whole. Raises ApiError if the response becomes too large."""
        self.keep_logprobs(number, token)

    def keep_logprobs(self, number: int, token: Token) -> None:
        """Store the log-probabilities of a token. Raises ApiError if the response becomes too large."""
        if not self._with_logprobs or token.token in self._end_tokens:
            return
        token_logprobs = self._encode_logprobs(token, self._text_offset(number, token))
        self._logprobs.setdefault(number, []).append(token_logprobs)
        self._count_logprobs(token_logprobs)

    def _count_logprobs(self, token_logprobs: EncodedLogprobs) -> None:
        """Count stored log-probabilities. Raises ApiError if the response becomes too large."""
        self.logprob_characters += sum(map(len, token_logprobs))
        if self.logprob_characters > MAX_LOGPROB_CHARACTERS:
            message = "logprobs: the response is too large to be sent whole; use a stream, fewer completions or tokens"
            raise ApiError(400, "answer_too_large", message, param="logprobs")

    def whole(self, sent: Sequence[tuple[int, Finished]], total: dict[str, int]) -> bytes:
        """Return the body of a whole response.

        sent: number and result of each sequence, in the order of sending
        """
        choices = []
        for index, (number, finished) in enumerate(sent):
            logprobs = self._logprob_lists(self._logprobs.pop(number, [])) if self._with_logprobs else "null"
            choice = {"index": index, **self._content(finished), "finish_reason": self._reason(finished)}
            choices.append(f'{json.dumps(choice)[:-1]}, "logprobs": {logprobs}}}')
        head = json.dumps({"id": self._id, "object": self.kind, **self._head, "usage": total})[:-1]
        return f'{head}, "choices": [{", ".join(choices)}]}}'.encode()

    def _reason(self, finished: Finished) -> str:
        return FINISH_REASONS[finished.reason]

    def _logprob_lists(self, logprobs: Sequence[EncodedLogprobs]) -> str:
        columns = zip(*logprobs, strict=True) if logprobs else ((),) * len(self._logprob_keys)
        lists = (f'"{name}": [{", ".join(items)}]' for name, items in zip(self._logprob_keys, columns, strict=True))
        return f"{{{', '.join(lists)}{self._logprob_suffix}}}"

    def _text_offset(self, number: int, token: Token) -> int:
        """Return where the token's text begins in its sequence, in characters, and advance behind it."""
        characters = self._characters.get(number, 0)
        self._characters[number] = characters + len(token.text)
        return characters

    # ---- implemented by each endpoint ------------------------------------------------------------------------
    @abstractmethod
    def _text_content(self, text: str) -> str: ...

    @abstractmethod
    def _content(self, finished: Finished) -> dict[str, Any]: ...

    @abstractmethod
    def _encode_logprobs(self, token: Token, offset: int) -> EncodedLogprobs:
        """Return the JSON of a token's log-probabilities.

        offset: where its text begins, in characters
        """


def top_with_sampled(token: Token) -> Sequence[Likely]:
    """Return the most likely tokens, followed by the sampled one if it is not among them."""
    if token.logprob is None or any(likely.token == token.token for likely in token.top):
        return token.top
    return (*token.top, Likely(token=token.token, piece=token.piece, logprob=token.logprob))


def logprob_entry(piece: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": piece.decode(errors="replace"), "logprob": logprob, "bytes": list(piece)}


class CompletionEncoder(ResponseEncoder):
    """The encoder of responses of `/v1/completions`."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"
    _empty_content = '"text": ""'
    _logprob_keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

    def _text_content(self, text: str) -> str:
        return f'"text": {json.dumps(text)}'

    def _content(self, finished: Finished) -> dict[str, Any]:
        return {"text": finished.text}

    def _encode_logprobs(self, token: Token, offset: int) -> EncodedLogprobs:
        top = {_token_text(likely.piece): likely.logprob for likely in top_with_sampled(token)}
        return tuple(map(json.dumps, (_token_text(token.piece), token.logprob, top, offset)))


def _token_text(piece: bytes) -> str:
    """Return a token as text; its bytes if it is not valid UTF-8, so that different tokens have different keys."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
