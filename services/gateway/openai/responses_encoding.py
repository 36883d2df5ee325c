"""What answers of `/v1/responses` look like: one object, or events with names and numbers that build it up.

The text is an item of one part, and each call of a function an item after it. An item is added when the first of it is
there, and done when the next begins.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

from neuronpipe.protocol.messages.client import Finished, Token
from neuronpipe.services.gateway.http.api_errors import Problem
from neuronpipe.services.gateway.openai.answer_calls import Arguments, Begun, Call, Content, Part, Reader, new_id, read
from neuronpipe.services.gateway.openai.response_encoding import REASONS, ChatForm
from neuronpipe.services.gateway.templates.call_format import CallFormat

IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


@dataclasses.dataclass
class Item:
    """An item of the answer, as it grows. called: the call's id and its function's name; None: it is text."""

    called: tuple[str, str] | None = None
    pieces: list[str] = dataclasses.field(default_factory=list)
    status: str = IN_PROGRESS

    def __post_init__(self) -> None:
        self.id = f"{'msg' if self.called is None else 'fc'}_{os.urandom(12).hex()}"

    @property
    def text(self) -> str:
        """The text, or the arguments."""
        return "".join(self.pieces)

    def shown(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """As the response has it. parts: of a text."""
        if self.called is None:
            own = {"type": "message", "role": "assistant", "content": parts}
        else:
            own = {"type": "function_call", "call_id": self.called[0], "name": self.called[1], "arguments": self.text}
        return {"id": self.id, "status": self.status, **own}


class ResponseForm(ChatForm):
    """echoed: what a response says of its request; calls: how the answer calls functions, if it may; text: whether
    there may be text before the first call."""

    kind, chunk_kind, prefix = "response", "response", "resp"
    done = b""  # the last event says that it is the last

    def __init__(
        self, echoed: dict[str, Any], *about: Any, calls: CallFormat | None = None, text: bool = True, **more: Any
    ) -> None:
        super().__init__(*about, **more)
        self._echoed, self._calls, self._may_say = echoed, calls, text
        self._reader = None if calls is None else Reader(calls, text=text)
        self._items: list[Item] = []
        self._events = self._told = 0  # events that were made, ratings that were told in them
        self._places: list[int] = []  # of rated tokens, in characters of the answer
        self._said_characters = 0
        self._finished: Finished | None = None

    # ---- in pieces -------------------------------------------------------------------------------------------
    def first(self, number: int) -> bytes:
        """The response begins."""
        begun = self._response(IN_PROGRESS, [], None)
        return self._named("response.created", response=begun) + self._named("response.in_progress", response=begun)

    def piece(self, number: int, token: Token) -> bytes:
        """What a token adds. Ratings are kept too: the whole part comes again at its end."""
        self.keep(number, token)
        return self._grown(self._read(token.text))

    def last(self, number: int, finished: Finished) -> bytes:
        """The last item is whole."""
        self._finished = finished
        rest = self._grown(() if self._reader is None else self._reader.finish())
        if not self._items:
            rest += self._added(Item())
        complete = self._reader is not None and self._reader.complete
        return rest + self._item_done(self._end(finished, complete=complete))

    def counted(self, total: dict[str, Any]) -> bytes:
        """The response is whole."""
        assert self._finished is not None
        response = self._whole(self._finished, total)
        return self._named(f"response.{response['status']}", response=response)

    def failed(self, problem: Problem) -> bytes:
        """The last event of a stream that ends with an error."""
        return self._named("error", code=problem.code, message=problem.message, param=problem.param)

    def _read(self, text: str) -> Iterable[Part]:
        if self._reader is not None:
            return self._reader.push(text)
        return (Content(text),) if text else ()

    def _grown(self, parts: Iterable[Part]) -> bytes:
        """The events of what more the answer says."""
        return b"".join(event for part in parts for event in self._grow(part))

    def _grow(self, part: Part) -> Iterable[bytes]:
        if isinstance(part, Begun):
            if self._items:
                yield self._item_done(COMPLETED)
            yield self._added(Item((self._call_id(), part.name)))
        elif isinstance(part, Arguments):
            self._items[-1].pieces.append(part.text)
            yield self._named("response.function_call_arguments.delta", **self._place_of_item, delta=part.text)
        else:
            if not self._items:
                yield self._added(Item())
            self._items[-1].pieces.append(part.text)
            self._said_characters += len(part.text)
            ratings = self._ratings()
            new, self._told = ratings[self._told :], len(ratings)
            yield self._named(
                "response.output_text.delta", **self._place_of_part, delta=part.text, logprobs=self._loaded(new)
            )

    def _added(self, item: Item) -> bytes:
        self._items.append(item)
        added = self._named("response.output_item.added", output_index=len(self._items) - 1, item=item.shown([]))
        if item.called is not None:
            return added
        return added + self._named("response.content_part.added", **self._place_of_part, part=self._part("", []))

    def _item_done(self, status: str) -> bytes:
        """The last item of those that are there is whole."""
        item = self._items[-1]
        item.status = status
        if item.called is None:
            ratings = self._loaded(self._ratings())
            part = self._part(item.text, ratings)
            done = self._named(
                "response.output_text.done", **self._place_of_part, text=item.text, logprobs=ratings
            ) + self._named("response.content_part.done", **self._place_of_part, part=part)
        else:
            done = self._named(
                "response.function_call_arguments.done",
                **self._place_of_item,
                name=item.called[1],
                arguments=item.text,
            )
        index = len(self._items) - 1
        return done + self._named("response.output_item.done", output_index=index, item=self._output(item))

    def _end(self, finished: Finished, *, complete: bool) -> str:
        """The status of the last item. complete: whether a call has all its arguments, if that is one."""
        item = self._items[-1]
        if item.called is not None:
            return COMPLETED if complete else INCOMPLETE
        item.pieces, self._said_characters = [finished.text], len(finished.text) + 1  # to the last rating
        return _status(finished)

    def _call_id(self) -> str:
        assert self._calls is not None
        return new_id(self._calls)

    def _named(self, name: str, /, **fields: Any) -> bytes:
        content = json.dumps({"type": name, "sequence_number": self._events, **fields})
        self._events += 1
        return f"event: {name}\ndata: {content}\n\n".encode()

    @property
    def _place_of_item(self) -> dict[str, Any]:
        return {"item_id": self._items[-1].id, "output_index": len(self._items) - 1}

    @property
    def _place_of_part(self) -> dict[str, Any]:
        return {**self._place_of_item, "content_index": 0}

    # ---- in one piece ----------------------------------------------------------------------------------------
    def whole(self, sent: Sequence[tuple[int, Finished]], total: dict[str, Any]) -> bytes:
        """The response."""
        ((_, finished),) = sent
        text, calls, complete = finished.text, list[Call](), False
        if self._calls is not None:
            text, calls, complete = read(text, self._calls, before=self._may_say)
            self._said_characters = len(text)
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
            "id": self._id.replace("-", "_", 1),
            "object": self.kind,
            "created_at": self._head["created"],
            "model": self._head["model"],
            "status": status,
            **self._echoed,
            "output": output,
            "usage": usage,
        }

    def _output(self, item: Item) -> dict[str, Any]:
        return item.shown([self._part(item.text, self._loaded(self._ratings()))])

    def _part(self, text: str, ratings: list[Any]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": ratings}

    # ---- ratings ---------------------------------------------------------------------------------------------
    def _place(self, number: int, token: Token) -> int:
        self._places.append(super()._place(number, token))
        return self._places[-1]

    def _ratings(self) -> list[tuple[str, ...]]:
        """Of the text's tokens; those of calls are told nowhere."""
        kept = self._kept.get(0, [])
        return kept[: bisect.bisect_left(self._places, self._said_characters)]

    def _loaded(self, ratings: Sequence[tuple[str, ...]]) -> list[Any]:
        return [json.loads(one) for (one,) in ratings] if self._rates else []


def _status(finished: Finished) -> str:
    """A text that was cut off is incomplete."""
    return INCOMPLETE if REASONS[finished.reason] == "length" else COMPLETED
