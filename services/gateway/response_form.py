"""What answers of `/v1/responses` look like: one object, or events with names and numbers that build it up."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from neuronpipe.protocol.messages.client import Finished, Token
from neuronpipe.services.gateway.forms import REASONS, ChatForm
from neuronpipe.services.gateway.problems import Problem


class ResponseForm(ChatForm):
    """echoed: what a response says of its request. There is one text, an item of one part."""

    kind, chunk_kind, prefix = "response", "response", "resp"
    done = b""  # the last event says that it is the last

    def __init__(self, echoed: dict[str, Any], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._echoed = echoed
        self._item = f"msg_{os.urandom(12).hex()}"
        self._events = self._told = 0  # events that were made, ratings that were told in them
        self._finished: Finished | None = None

    # ---- in pieces -------------------------------------------------------------------------------------------
    def first(self, number: int) -> bytes:
        """The response begins, its item, and the item's part."""
        begun = self._response("in_progress", [], None)
        return b"".join(
            (
                self._named("response.created", response=begun),
                self._named("response.in_progress", response=begun),
                self._named("response.output_item.added", output_index=0, item=self._message("in_progress", [])),
                self._named("response.content_part.added", **self._place_of_part, part=self._part("", [])),
            )
        )

    def piece(self, number: int, token: Token) -> bytes:
        """What a token adds. Ratings are kept too: the whole part comes again at its end."""
        self.keep(number, token)
        if not token.text:
            return b""
        kept = self._kept.get(number, [])
        ratings, self._told = self._loaded(kept[self._told :]), len(kept)
        return self._named("response.output_text.delta", **self._place_of_part, delta=token.text, logprobs=ratings)

    def last(self, number: int, finished: Finished) -> bytes:
        """The part is whole, and so is the item."""
        self._finished = finished
        ratings = self._loaded(self._kept.get(number, []))
        part = self._part(finished.text, ratings)
        item = self._message(_status(finished), [part])
        return b"".join(
            (
                self._named("response.output_text.done", **self._place_of_part, text=finished.text, logprobs=ratings),
                self._named("response.content_part.done", **self._place_of_part, part=part),
                self._named("response.output_item.done", output_index=0, item=item),
            )
        )

    def counted(self, total: dict[str, Any]) -> bytes:
        """The response is whole."""
        assert self._finished is not None
        response = self._whole(self._finished, total)
        return self._named(f"response.{response['status']}", response=response)

    def failed(self, problem: Problem) -> bytes:
        """The last event of a stream that ends with an error."""
        return self._named("error", code=problem.code, message=problem.message, param=problem.param)

    def _named(self, name: str, **fields: Any) -> bytes:
        content = json.dumps({"type": name, "sequence_number": self._events, **fields})
        self._events += 1
        return f"event: {name}\ndata: {content}\n\n".encode()

    @property
    def _place_of_part(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    # ---- in one piece ----------------------------------------------------------------------------------------
    def whole(self, sent: Sequence[tuple[int, Finished]], total: dict[str, Any]) -> bytes:
        """The response."""
        ((_, finished),) = sent
        return json.dumps(self._whole(finished, total)).encode()

    def _whole(self, finished: Finished, total: dict[str, Any]) -> dict[str, Any]:
        part = self._part(finished.text, self._loaded(self._kept.get(0, [])))
        item = self._message(_status(finished), [part])
        usage = {
            "input_tokens": total["prompt_tokens"],
            "input_tokens_details": total["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": total["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": total["total_tokens"],
        }
        response = self._response(_status(finished), [item], usage)
        if response["status"] == "incomplete":
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

    def _message(self, status: str, content: list[Any]) -> dict[str, Any]:
        return {"id": self._item, "type": "message", "status": status, "role": "assistant", "content": content}

    def _part(self, text: str, ratings: list[Any]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": ratings}

    def _loaded(self, ratings: Sequence[tuple[str, ...]]) -> list[Any]:
        return [json.loads(one) for (one,) in ratings] if self._rates else []


def _status(finished: Finished) -> str:
    """A text that was cut off is incomplete."""
    return "incomplete" if REASONS[finished.reason] == "length" else "completed"
