"""The encoder of `/v1/responses`: one object, or a stream of typed and numbered events that build it up.

The text is an item with one part, and each function call is an item after it. An item is added with its first token and
done when the next item begins.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

from neuronpipe.protocol.messages.client import Finished, Token
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.openai.answer_calls import (
    Arguments,
    CallStart,
    Part,
    new_call_id,
    parse_answer,
    parser_of,
)
from neuronpipe.services.gateway.openai.response_encoding import FINISH_REASONS, ChatEncoder, typed_event
from neuronpipe.services.gateway.templates.call_format import CallFormat

IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


@dataclasses.dataclass
class Item:
    """An item of the response, which grows.

    call: the id of the call and the name of its function; None for an item of text
    """

    call: tuple[str, str] | None = None
    pieces: list[str] = dataclasses.field(default_factory=list)
    status: str = IN_PROGRESS

    def __post_init__(self) -> None:
        self.id = f"{'msg' if self.call is None else 'fc'}_{os.urandom(12).hex()}"

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def as_json(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the item in the form of the response.

        parts: the content of an item of text
        """
        if self.call is None:
            fields = {"type": "message", "role": "assistant", "content": parts}
        else:
            fields = {"type": "function_call", "call_id": self.call[0], "name": self.call[1], "arguments": self.text}
        return {"id": self.id, "status": self.status, **fields}


class ResponsesEncoder(ChatEncoder):
    """Encodes one response of `/v1/responses`.

    echoed: the fields of the response that repeat its request
    calls: the call format; None if no functions may be called
    text: True if there may be text before the first call
    """

    kind, chunk_kind, prefix = "response", "response", "resp_"
    done = b""  # the type of the last event marks the end

    def __init__(
        self, echoed: dict[str, Any], *about: Any, calls: CallFormat | None = None, text: bool = True, **more: Any
    ) -> None:
        super().__init__(*about, **more)
        self._echoed, self._calls, self._may_have_text = echoed, calls, text
        self._parser = parser_of(calls, text=text)
        self._items: list[Item] = []
        self._events = self._sent_logprobs = 0  # numbers of events, and of log-probabilities in them
        self._token_offsets: list[int] = []  # where each rated token begins, in characters of the completion
        self._text_characters = 0
        self._finished: Finished | None = None

    # ---- in pieces -------------------------------------------------------------------------------------------
    def first(self, number: int) -> bytes:
        begun = self._response(IN_PROGRESS, [], None)
        return self._typed_event("response.created", response=begun) + self._typed_event(
            "response.in_progress", response=begun
        )

    def piece(self, number: int, token: Token) -> bytes:
        """Return the events of a token. Its log-probabilities are stored, because the last events repeat them."""
        self.keep_logprobs(number, token)
        return self._part_events(self._parser.push(token.text))

    def last(self, number: int, finished: Finished) -> bytes:
        """Return the events that end the last item."""
        self._finished = finished
        events = self._part_events(self._parser.finish())
        if not self._items:
            events += self._added(Item())
        return events + self._item_done(self._end(finished, complete=self._parser.complete))

    def usage_chunk(self, total: dict[str, Any]) -> bytes:
        assert self._finished is not None
        response = self._whole(self._finished, total)
        return self._typed_event(f"response.{response['status']}", response=response)

    def error_chunk(self, problem: ApiError) -> bytes:
        """Return the last event of a stream that ends with an error."""
        return self._typed_event("error", code=problem.code, message=problem.message, param=problem.param)

    def _part_events(self, parts: Iterable[Part]) -> bytes:
        return b"".join(event for part in parts for event in self._events_of(part))

    def _events_of(self, part: Part) -> Iterable[bytes]:
        if isinstance(part, CallStart):
            if self._items:
                yield self._item_done(COMPLETED)
            yield self._added(Item((self._call_id(), part.name)))
        elif isinstance(part, Arguments):
            self._items[-1].pieces.append(part.text)
            yield self._typed_event("response.function_call_arguments.delta", **self._item_position, delta=part.text)
        else:
            if not self._items:
                yield self._added(Item())
            self._items[-1].pieces.append(part.text)
            self._text_characters += len(part.text)
            logprobs = self._text_logprobs()
            new, self._sent_logprobs = logprobs[self._sent_logprobs :], len(logprobs)
            yield self._typed_event(
                "response.output_text.delta", **self._part_position, delta=part.text, logprobs=self._decoded(new)
            )

    def _added(self, item: Item) -> bytes:
        self._items.append(item)
        added = self._typed_event(
            "response.output_item.added", output_index=len(self._items) - 1, item=item.as_json([])
        )
        if item.call is not None:
            return added
        return added + self._typed_event("response.content_part.added", **self._part_position, part=self._part("", []))

    def _item_done(self, status: str) -> bytes:
        item = self._items[-1]
        item.status = status
        if item.call is None:
            logprobs = self._decoded(self._text_logprobs())
            part = self._part(item.text, logprobs)
            done = self._typed_event(
                "response.output_text.done", **self._part_position, text=item.text, logprobs=logprobs
            ) + self._typed_event("response.content_part.done", **self._part_position, part=part)
        else:
            done = self._typed_event(
                "response.function_call_arguments.done",
                **self._item_position,
                name=item.call[1],
                arguments=item.text,
            )
        index = len(self._items) - 1
        return done + self._typed_event("response.output_item.done", output_index=index, item=self._output(item))

    def _end(self, finished: Finished, *, complete: bool) -> str:
        """Complete the last item and return its status.

        complete: True if its call has all arguments
        """
        item = self._items[-1]
        if item.call is not None:
            return COMPLETED if complete else INCOMPLETE
        item.pieces, self._text_characters = [finished.text], len(finished.text) + 1  # one more: include all ratings
        return _status(finished)

    def _call_id(self) -> str:
        assert self._calls is not None
        return new_call_id(self._calls)

    def _typed_event(self, name: str, /, **fields: Any) -> bytes:
        self._events += 1
        return typed_event(name, sequence_number=self._events - 1, **fields)

    @property
    def _item_position(self) -> dict[str, Any]:
        return {"item_id": self._items[-1].id, "output_index": len(self._items) - 1}

    @property
    def _part_position(self) -> dict[str, Any]:
        return {**self._item_position, "content_index": 0}

    # ---- in one piece ----------------------------------------------------------------------------------------
    def whole(self, sent: Sequence[tuple[int, Finished]], total: dict[str, Any]) -> bytes:
        ((_, finished),) = sent
        text, calls, complete = parse_answer(finished.text, self._calls, before=self._may_have_text)
        self._text_characters = len(text)
        if text or not calls:
            self._items.append(Item(None, [text], COMPLETED))
        for call in calls:
            self._items.append(Item((self._call_id(), call.name), [call.arguments], COMPLETED))
        self._items[-1].status = self._end(finished, complete=complete)
        return json.dumps(self._whole(finished, total)).encode()

    def _whole(self, finished: Finished, total: dict[str, Any]) -> dict[str, Any]:
        usage = {
            "input_tokens": total["prompt_tokens"],
            "input_tokens_details": total["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": total["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": total["total_tokens"],
        }
        response = self._response(_status(finished), [self._output(item) for item in self._items], usage)
        if response["status"] == INCOMPLETE:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def _response(self, status: str, output: list[Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": self.kind,
            "created_at": self._head["created"],
            "model": self._head["model"],
            "status": status,
            **self._echoed,
            "output": output,
            "usage": usage,
        }

    def _output(self, item: Item) -> dict[str, Any]:
        return item.as_json([self._part(item.text, self._decoded(self._text_logprobs()))])

    def _part(self, text: str, logprobs: list[Any]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    # ---- logprobs ---------------------------------------------------------------------------------------------
    def _text_offset(self, number: int, token: Token) -> int:
        self._token_offsets.append(super()._text_offset(number, token))
        return self._token_offsets[-1]

    def _text_logprobs(self) -> list[tuple[str, ...]]:
        """Return the log-probabilities of the text's tokens; a response cannot contain those of calls."""
        stored = self._logprobs.get(0, [])
        return stored[: bisect.bisect_left(self._token_offsets, self._text_characters)]

    def _decoded(self, logprobs: Sequence[tuple[str, ...]]) -> list[Any]:
        return [json.loads(encoded) for (encoded,) in logprobs] if self._with_logprobs else []


def _status(finished: Finished) -> str:
    """Return the status of a response: incomplete if the completion was cut off."""
    return INCOMPLETE if FINISH_REASONS[finished.reason] == "length" else COMPLETED
