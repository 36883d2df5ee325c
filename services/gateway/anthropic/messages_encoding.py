"""The encoder of `/v1/messages`: one object, or a stream of typed events that build it up.

The text is a block, and each call of a tool is a block after it. A block begins with its first token and stops when the
next one begins.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from neuronpipe.protocol.messages.client import Accepted, Finished, Token
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.openai.answer_calls import (
    Arguments,
    CallStart,
    Part,
    new_call_id,
    parse_answer,
    parser_of,
)
from neuronpipe.services.gateway.openai.response_encoding import ChatEncoder, typed_event
from neuronpipe.services.gateway.templates.call_format import CallFormat

STOP_REASONS = {
    "length": "max_tokens",
    "context": "model_context_window_exceeded",
    "stop": "stop_sequence",
    "end": "end_turn",
}
PING = typed_event("ping")
EMPTY_TEXT = {"type": "text", "text": ""}


class MessagesEncoder(ChatEncoder):
    """Encodes one response of `/v1/messages`.

    calls: the call format; None if no tools may be called
    text: True if there may be text before the first call
    """

    kind, chunk_kind, prefix = "message", "message", "msg_"
    done = b""  # the type of the last event marks the end

    def __init__(self, *about: Any, calls: CallFormat | None = None, text: bool = True, **more: Any) -> None:
        super().__init__(*about, **more)
        self._calls, self._may_have_text = calls, text
        self._parser = parser_of(calls, text=text)
        self._blocks = 0  # begun so far; the last is open until the message ends
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
        return self._part_events(self._parser.push(token.text))

    def last(self, number: int, finished: Finished) -> bytes:
        """Return the events that end the last block; there is one even if the completion is empty."""
        self._finished = finished
        events = self._part_events(self._parser.finish())
        if not self._blocks:
            events += self._block_start(EMPTY_TEXT)
        return events + self._block_stop()

    def usage_chunk(self, total: dict[str, Any]) -> bytes:
        assert self._finished is not None
        ending = _ending(self._finished, complete=self._parser.complete)
        return typed_event("message_delta", delta=ending, usage=_usage_of(total)) + typed_event("message_stop")

    def error_chunk(self, problem: ApiError) -> bytes:
        """Return the last event of a stream that ends with an error."""
        return f"event: error\ndata: {json.dumps(problem.anthropic())}\n\n".encode()

    def _part_events(self, parts: Iterable[Part]) -> bytes:
        return b"".join(event for part in parts for event in self._events_of(part))

    def _events_of(self, part: Part) -> Iterator[bytes]:
        if isinstance(part, CallStart):
            if self._blocks:
                yield self._block_stop()
            yield self._block_start({**self._tool_use(part.name), "input": {}})
        elif isinstance(part, Arguments):
            yield self._delta({"type": "input_json_delta", "partial_json": part.text})
        else:
            if not self._blocks:
                yield self._block_start(EMPTY_TEXT)
            yield self._delta({"type": "text_delta", "text": part.text})

    def _block_start(self, block: dict[str, Any]) -> bytes:
        self._blocks += 1
        return typed_event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, str]) -> bytes:
        return typed_event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _block_stop(self) -> bytes:
        return typed_event("content_block_stop", index=self._blocks - 1)

    # ---- in one piece ----------------------------------------------------------------------------------------
    def whole(self, sent: Sequence[tuple[int, Finished]], total: dict[str, Any]) -> bytes:
        """Return the body of a whole response. The arguments of a call that was cut off are empty."""
        ((_, finished),) = sent
        text, calls, complete = parse_answer(finished.text, self._calls, before=self._may_have_text)
        blocks = [json.dumps(EMPTY_TEXT | {"text": text})] if text or not calls else []
        for number, call in enumerate(calls, 1):
            # Arguments are inserted as they are: parsing could change numbers, and exceed limits of Python.
            arguments = call.arguments if complete or number < len(calls) else "{}"
            blocks.append(f'{json.dumps(self._tool_use(call.name))[:-1]}, "input": {arguments}}}')
        message = {**self._about(), **_ending(finished, complete=complete), "usage": _usage_of(total)}
        return f'{json.dumps(message)[:-1]}, "content": [{", ".join(blocks)}]}}'.encode()

    def _about(self) -> dict[str, Any]:
        return {"id": self._id, "type": self.kind, "role": "assistant", "model": self._head["model"]}

    def _tool_use(self, name: str) -> dict[str, Any]:
        assert self._calls is not None
        return {"type": "tool_use", "id": new_call_id(self._calls), "name": name}


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
