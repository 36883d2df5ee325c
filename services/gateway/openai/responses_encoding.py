"""The encoder of `/v1/responses`: one object, or a stream of typed and numbered events that build it up.

Reasoning and text are items with one part each, and each function call is an item. An item is added with its first
token and done when the next item begins.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from neuronpipe.protocol.messages.client import Finished, Token
from neuronpipe.services.gateway.answers.answer_format import parts_of
from neuronpipe.services.gateway.answers.parts import Arguments, CallStart, Content, Part, Reasoning
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.openai.chat_encoding import ChatEncoder
from neuronpipe.services.gateway.openai.response_encoding import FINISH_REASONS, typed_event

IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


class ItemKind(NamedTuple):
    """The names that the items of one kind have, in the response and in its events."""

    type: str
    prefix: str
    part: str = ""
    events: str = ""


TEXT_ITEM = ItemKind("message", "msg", "output_text", "response.output_text")
REASONING_ITEM = ItemKind("reasoning", "rs", "reasoning_text", "response.reasoning_text")
CALL_ITEM = ItemKind("function_call", "fc", events="response.function_call_arguments")


@dataclasses.dataclass
class Item:
    """An item of the response, which grows.

    call: the id of the call and the name of its function; None for other items
    """

    kind: ItemKind
    call: tuple[str, str] | None = None
    pieces: list[str] = dataclasses.field(default_factory=list)
    status: str = IN_PROGRESS

    def __post_init__(self) -> None:
        self.id = f"{self.kind.prefix}_{os.urandom(12).hex()}"

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def as_json(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the item in the form of the response.

        parts: the content of an item of text or reasoning
        """
        item: dict[str, Any] = {"id": self.id, "status": self.status, "type": self.kind.type}
        if self.call is not None:
            return item | {"call_id": self.call[0], "name": self.call[1], "arguments": self.text}
        extra: dict[str, Any] = {"summary": []} if self.kind is REASONING_ITEM else {"role": "assistant"}
        return item | extra | {"content": parts}


class ResponsesEncoder(ChatEncoder):
    """Encodes one response of `/v1/responses`.

    echoed: the fields of the response that repeat its request
    """

    kind, chunk_kind, prefix = "response", "response", "resp_"
    done = b""  # the type of the last event marks the end

    def __init__(self, echoed: dict[str, Any], *about: Any, **more: Any) -> None:
        super().__init__(*about, **more)
        self._echoed = echoed
        self._items: list[Item] = []
        self._events = self._sent_logprobs = 0  # numbers of events, and of log-probabilities in them
        self._token_offsets: list[int] = []  # where each rated token begins, in characters of the completion
        self._first_text_token: int | None = 0 if self._answer.thinking is None else None  # of the rated ones
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
        return self._part_events(self._push(number, token))

    def last(self, number: int, finished: Finished) -> bytes:
        """Return the events that end the last item."""
        self._finished = finished
        events = self._part_events(self._parser(number).finish())
        if not self._items:
            events += self._added(Item(TEXT_ITEM))
        return events + self._item_done(self._last_status(finished, complete=self._parser(number).complete))

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
            yield from self._begun(Item(CALL_ITEM, (self._new_call_id(), part.name)))
            return
        kind = REASONING_ITEM if isinstance(part, Reasoning) else TEXT_ITEM
        if not isinstance(part, Arguments) and (not self._items or self._items[-1].kind is not kind):
            yield from self._begun(Item(kind))
        item, extra = self._items[-1], dict[str, Any]()
        item.pieces.append(part.text)
        if isinstance(part, Content):
            self._text_characters += len(part.text)
            logprobs = self._text_logprobs()
            new, self._sent_logprobs = logprobs[self._sent_logprobs :], len(logprobs)
            extra["logprobs"] = self._decoded(new)
        yield self._typed_event(f"{item.kind.events}.delta", **self._position, delta=part.text, **extra)

    def _begun(self, item: Item) -> Iterable[bytes]:
        if self._items:
            yield self._item_done(COMPLETED)
        yield self._added(item)

    def _added(self, item: Item) -> bytes:
        self._items.append(item)
        added = self._typed_event(
            "response.output_item.added", output_index=len(self._items) - 1, item=item.as_json([])
        )
        if item.call is not None:
            return added
        part = self._part(item, "", [])
        return added + self._typed_event("response.content_part.added", **self._position, part=part)

    def _item_done(self, status: str) -> bytes:
        item = self._items[-1]
        item.status = status
        name = f"{item.kind.events}.done"
        if item.call is not None:
            done = self._typed_event(name, **self._position, name=item.call[1], arguments=item.text)
        else:
            logprobs = self._decoded(self._text_logprobs())
            extra = {"logprobs": logprobs} if item.kind is TEXT_ITEM else {}
            part = self._part(item, item.text, logprobs)
            done = self._typed_event(name, **self._position, text=item.text, **extra)
            done += self._typed_event("response.content_part.done", **self._position, part=part)
        index = len(self._items) - 1
        return done + self._typed_event("response.output_item.done", output_index=index, item=self._output(item))

    def _last_status(self, finished: Finished, *, complete: bool) -> str:
        """Return the status of the last item.

        complete: True if its call has all arguments
        """
        if self._items[-1].kind is CALL_ITEM:
            return COMPLETED if complete else INCOMPLETE
        self._text_characters = len(finished.text) + 1  # one more: include all ratings
        return _status(finished)

    def _typed_event(self, name: str, /, **fields: Any) -> bytes:
        self._events += 1
        return typed_event(name, sequence_number=self._events - 1, **fields)

    @property
    def _position(self) -> dict[str, Any]:
        """Return where the last item, or its only part, is in the response."""
        position = {"item_id": self._items[-1].id, "output_index": len(self._items) - 1}
        return position if self._items[-1].call is not None else position | {"content_index": 0}

    # ---- in one piece ----------------------------------------------------------------------------------------
    def whole(self, sent: Sequence[tuple[int, Finished]], total: dict[str, Any]) -> bytes:
        ((_, finished),) = sent
        parts, complete = parts_of(finished.text, self._answer)
        for part in parts:
            if isinstance(part, CallStart):
                self._items.append(Item(CALL_ITEM, (self._new_call_id(), part.name), [], COMPLETED))
            elif isinstance(part, Arguments):
                self._items[-1].pieces.append(part.text)
            else:
                kind = REASONING_ITEM if isinstance(part, Reasoning) else TEXT_ITEM
                self._items.append(Item(kind, None, [part.text], COMPLETED))
                self._text_characters += len(part.text) * (kind is TEXT_ITEM)
        self._items = self._items or [Item(TEXT_ITEM)]
        self._items[-1].status = self._last_status(finished, complete=complete)
        return json.dumps(self._whole(finished, total)).encode()

    def _whole(self, finished: Finished, total: dict[str, Any]) -> dict[str, Any]:
        usage = {
            "input_tokens": total["prompt_tokens"],
            "input_tokens_details": total["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": total["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
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
        return item.as_json([self._part(item, item.text, self._decoded(self._text_logprobs()))])

    def _part(self, item: Item, text: str, logprobs: list[Any]) -> dict[str, Any]:
        part = {"type": item.kind.part, "text": text}
        return part | {"annotations": [], "logprobs": logprobs} if item.kind is TEXT_ITEM else part

    # ---- logprobs ---------------------------------------------------------------------------------------------
    def _push(self, number: int, token: Token) -> list[Part]:
        parts = super()._push(number, token)
        if self._first_text_token is None and any(isinstance(part, Content) for part in parts):
            self._first_text_token = max(0, len(self._token_offsets) - 1)
        return parts

    def _text_offset(self, number: int, token: Token) -> int:
        self._token_offsets.append(super()._text_offset(number, token))
        return self._token_offsets[-1]

    def _text_logprobs(self) -> list[tuple[str, ...]]:
        """Return the log-probabilities of the text's tokens; a response cannot contain those of other items. Behind
        reasoning they begin with the first token that shows text."""
        stored, first = self._logprobs.get(0, []), self._first_text_token
        if first is None or not stored:
            return []
        end = self._token_offsets[first] + self._text_characters
        return stored[first : bisect.bisect_left(self._token_offsets, end)]

    def _decoded(self, logprobs: Sequence[tuple[str, ...]]) -> list[Any]:
        return [json.loads(encoded) for (encoded,) in logprobs] if self._with_logprobs else []


def _status(finished: Finished) -> str:
    """Return the status of a response: incomplete if the completion was cut off."""
    return INCOMPLETE if FINISH_REASONS[finished.reason] == "length" else COMPLETED
