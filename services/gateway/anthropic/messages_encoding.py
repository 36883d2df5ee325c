"""The encoder of `/v1/messages`: one object, or a stream of typed events that build it up.

Reasoning, text and each call of a tool are blocks. A block begins with its first token and stops when the next one
begins. Blocks of reasoning end with a signature, because clients expect one; it is the same for all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from neuronpipe.protocol.messages.client import Accepted, Finished, Token
from neuronpipe.services.gateway.answers.answer_format import parts_of
from neuronpipe.services.gateway.answers.parts import Arguments, CallStart, Content, Part, Reasoning
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.openai.chat_encoding import ChatEncoder
from neuronpipe.services.gateway.openai.response_encoding import typed_event

STOP_REASONS = {
    "length": "max_tokens",
    "context": "model_context_window_exceeded",
    "stop": "stop_sequence",
    "end": "end_turn",
}
PING = typed_event("ping")
EMPTY_TEXT = {"type": "text", "text": ""}
EMPTY_THINKING = {"type": "thinking", "thinking": "", "signature": ""}
SIGNATURE = "unsigned"


class MessagesEncoder(ChatEncoder):
    """Encodes one response of `/v1/messages`."""

    kind, chunk_kind, prefix = "message", "message", "msg_"
    done = b""  # the type of the last event marks the end

    def __init__(self, *about: Any, **more: Any) -> None:
        super().__init__(*about, **more)
        self._blocks = 0  # begun so far; the last is open until the message ends
        self._kind: type[Part] | None = None  # of the last block
        self._finished: Finished | None = None

    # ---- in pieces -------------------------------------------------------------------------------------------
    def accepted(self, number: int, message: Accepted) -> bytes:
        """Return the event that begins the message. How much of the prompt is cached, only the last events say."""
        self.keep_alive = PING  # before, clients expect no event
        counts = _usage(message.prompt_tokens, 0, 0)
        begun = {**self._about(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": counts}
        return typed_event("message_start", message=begun)

    def first(self, number: int) -> bytes:
        return b""

    def piece(self, number: int, token: Token) -> bytes:
        return self._part_events(self._push(number, token))

    def last(self, number: int, finished: Finished) -> bytes:
        """Return the events that end the last block; there is one even if the completion is empty."""
        self._finished = finished
        events = self._part_events(self._parser(number).finish())
        if not self._blocks:
            events += self._block_start(Content, EMPTY_TEXT)
        return events + self._block_stop()

    def usage_chunk(self, total: dict[str, Any]) -> bytes:
        assert self._finished is not None
        ending = _ending(self._finished, complete=self._parser(0).complete)
        return typed_event("message_delta", delta=ending, usage=_usage_of(total)) + typed_event("message_stop")

    def error_chunk(self, problem: ApiError) -> bytes:
        """Return the last event of a stream that ends with an error."""
        return f"event: error\ndata: {json.dumps(problem.anthropic())}\n\n".encode()

    def _part_events(self, parts: Iterable[Part]) -> bytes:
        return b"".join(event for part in parts for event in self._events_of(part))

    def _events_of(self, part: Part) -> Iterator[bytes]:
        if isinstance(part, CallStart):
            yield from self._begin_block(CallStart, {**self._tool_use(part.name), "input": {}})
        elif isinstance(part, Arguments):
            yield self._block_delta({"type": "input_json_delta", "partial_json": part.text})
        elif isinstance(part, Reasoning):
            if self._kind is not Reasoning:
                yield from self._begin_block(Reasoning, EMPTY_THINKING)
            yield self._block_delta({"type": "thinking_delta", "thinking": part.text})
        else:
            if self._kind is not Content:
                yield from self._begin_block(Content, EMPTY_TEXT)
            yield self._block_delta({"type": "text_delta", "text": part.text})

    def _begin_block(self, kind: type[Part], block: dict[str, Any]) -> Iterator[bytes]:
        if self._blocks:
            yield self._block_stop()
        yield self._block_start(kind, block)

    def _block_start(self, kind: type[Part], block: dict[str, Any]) -> bytes:
        self._blocks, self._kind = self._blocks + 1, kind
        return typed_event("content_block_start", index=self._blocks - 1, content_block=block)

    def _block_delta(self, delta: dict[str, str]) -> bytes:
        return typed_event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _block_stop(self) -> bytes:
        signature = b""
        if self._kind is Reasoning:
            signature = self._block_delta({"type": "signature_delta", "signature": SIGNATURE})
        return signature + typed_event("content_block_stop", index=self._blocks - 1)

    # ---- in one piece ----------------------------------------------------------------------------------------
    def whole(self, sent: Sequence[tuple[int, Finished]], total: dict[str, Any]) -> bytes:
        """Return the body of a whole response. The arguments of a call that was cut off are empty."""
        ((_, finished),) = sent
        parts, complete = parts_of(finished.text, self._answer)
        calls = sum(isinstance(part, CallStart) for part in parts)
        blocks = list[str]()
        for part in parts:
            if isinstance(part, Reasoning):
                blocks.append(json.dumps({"type": "thinking", "thinking": part.text, "signature": SIGNATURE}))
            elif isinstance(part, Content):
                blocks.append(json.dumps(EMPTY_TEXT | {"text": part.text}))
            elif isinstance(part, CallStart):
                blocks.append(json.dumps(self._tool_use(part.name) | {"input": {}}))
            elif complete or part.call < calls - 1:
                # Arguments are inserted as they are: parsing could change numbers, and exceed limits of Python.
                blocks[-1] = blocks[-1].removesuffix("{}}") + part.text + "}"
        message = {**self._about(), **_ending(finished, complete=complete), "usage": _usage_of(total)}
        content = ", ".join(blocks or [json.dumps(EMPTY_TEXT)])
        return f'{json.dumps(message)[:-1]}, "content": [{content}]}}'.encode()

    def _about(self) -> dict[str, Any]:
        return {"id": self._id, "type": self.kind, "role": "assistant", "model": self._head["model"]}

    def _tool_use(self, name: str) -> dict[str, Any]:
        return {"type": "tool_use", "id": self._new_call_id(), "name": name}


def _ending(finished: Finished, *, complete: bool) -> dict[str, str | None]:
    """Return why a message ends.

    complete: True if it ends with a complete call
    """
    reason = STOP_REASONS[finished.reason]
    if complete and finished.reason in ("stop", "end"):
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": finished.stop if reason == "stop_sequence" else None}


def _usage_of(total: dict[str, Any]) -> dict[str, int]:
    cached_tokens = total["prompt_tokens_details"]["cached_tokens"]
    return _usage(total["prompt_tokens"], cached_tokens, total["completion_tokens"])


def _usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return token counts in Anthropic's form, where cached tokens of the prompt are no input tokens."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": completion_tokens,
    }
