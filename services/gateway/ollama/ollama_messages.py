"""The conversation of a request of Ollama's API, and its translation to chat messages.

Arguments of calls are objects, and calls need no ids: a result belongs to the call that it names, or else to the first
call before it that has no result yet.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from itertools import count
from typing import Annotated, Any, Literal

from neuronpipe.services.gateway.http.schema_base import Lenient, conflict, missing_parameter, refuse_with
from neuronpipe.services.gateway.openai.tools import MAX_TOOLS, NAME, FunctionName
from pydantic import Field, model_validator

Images = Annotated[list[str], refuse_with("the models of this server read only text")]
NO_IMAGES = "Images are refused; an empty list is accepted."


class OllamaFunction(Lenient):
    """The name and arguments of a call."""

    name: FunctionName = Field(description=NAME)
    arguments: dict[str, Any] = Field(default={}, description="The arguments: a JSON object.")


class OllamaCall(Lenient):
    """A call in an earlier message of the assistant."""

    id: str | None = Field(None, description="The id of the call, which its result may repeat.")
    function: OllamaFunction = Field(description="The name and arguments of the call.")


class OllamaMessage(Lenient):
    """A message of the conversation."""

    role: Literal["system", "user", "assistant", "tool"] = Field(description="The author of the message.")
    content: str | None = Field(
        None, description="The text of the message. It is optional beside `tool_calls` and `thinking`."
    )
    images: Images = Field(default=[], description=NO_IMAGES)
    thinking: str | None = Field(
        None, description="What the assistant thought before it answered; templates decide whether the model reads it."
    )
    tool_calls: list[OllamaCall] = Field(
        default=[], max_length=MAX_TOOLS, description="The calls of the assistant in this message."
    )
    tool_name: str | None = Field(
        None, description="The name of the function that this message, with the role `tool`, is the result of."
    )
    tool_call_id: str | None = Field(None, description="The id of the call that this message is the result of.")

    @model_validator(mode="after")
    def _check_fields(self) -> OllamaMessage:
        if self.content is None and not self.tool_calls and not self.thinking:
            raise missing_parameter("content")
        if self.thinking and self.role != "assistant":
            raise conflict("thinking", f"a message of the role {self.role} has no thinking")
        if self.tool_calls and self.role != "assistant":
            raise conflict("tool_calls", f"a message of the role {self.role} cannot call functions")
        return self


class PendingCalls:
    """The calls of a conversation that have no result yet, oldest first.

    stated: ids that its messages state, which no new id equals
    """

    def __init__(self, stated: Collection[str] = ()) -> None:
        self._stated = stated
        self._names: dict[str, str] = {}  # by the ids of the calls
        self._ids: dict[str, dict[str, None]] = {}  # by the names of the functions, oldest first
        self._numbers = count()

    def add(self, calls: Sequence[OllamaCall]) -> list[dict[str, Any]]:
        """Note calls; return them in the form of a chat message, each with an id."""
        chat_calls = []
        for call in calls:
            id_ = call.id if call.id is not None else self._new_id()
            self._remove(id_)
            self._names[id_] = call.function.name
            self._ids.setdefault(call.function.name, {})[id_] = None
            arguments = json.dumps(call.function.arguments, ensure_ascii=False)
            function = {"name": call.function.name, "arguments": arguments}
            chat_calls.append({"id": id_, "type": "function", "function": function})
        return chat_calls

    def id_for(self, result: OllamaMessage) -> str:
        """Return the id of the call to which a result belongs; a new id if there is none."""
        id_ = result.tool_call_id
        if id_ is None:
            matches = self._names if result.tool_name is None else self._ids.get(result.tool_name, {})
            id_ = next(iter(matches), None) or self._new_id()
        self._remove(id_)
        return id_

    def _remove(self, id_: str) -> None:
        if (name := self._names.pop(id_, None)) is not None:
            del self._ids[name][id_]

    def _new_id(self) -> str:
        return next(id_ for number in self._numbers if (id_ := f"call_{number}") not in self._stated)


def stated_ids(messages: Sequence[OllamaMessage]) -> set[str]:
    """Return the ids of calls and results that a client states."""
    ids = {message.tool_call_id for message in messages}
    ids |= {call.id for message in messages for call in message.tool_calls}
    return {id_ for id_ in ids if id_ is not None}


def chat_messages(messages: Sequence[OllamaMessage]) -> Iterator[dict[str, Any]]:
    """Yield messages in the form of a chat request."""
    pending = PendingCalls(stated_ids(messages))
    for message in messages:
        translated: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.role == "tool":
            translated |= {"tool_call_id": pending.id_for(message), "name": message.tool_name}
        elif message.tool_calls:
            translated["tool_calls"] = pending.add(message.tool_calls)
        if message.thinking:
            translated["reasoning_content"] = message.thinking
        yield translated
