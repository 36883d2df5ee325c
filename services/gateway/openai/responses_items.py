"""The conversation of a Responses API request: items, and their translation to chat messages.

A function call is an item of its own. In a chat message it belongs to the assistant's message before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from neuronpipe.protocol.errors import quoted
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.http.schema_base import (
    PARTS,
    TEXT,
    UNREAD,
    Lenient,
    text_or,
    union_of,
    unsupported,
)
from neuronpipe.services.gateway.openai.tools import FunctionName
from pydantic import Discriminator, Field, Tag, model_validator
from pydantic.json_schema import SkipJsonSchema

NOT_STORED = "responses are not stored on this server; send the whole conversation in input"
NO_REFERENCES = f"{NOT_STORED}, with items instead of references; many clients do so with `store: false`"


class ContentPart(Lenient):
    """A part of a message's text."""

    type: Literal["input_text", "output_text", "text"] = Field(description="The type of the part; all are text.")
    text: str = Field(description="The text of the part.")


class RefusalPart(Lenient):
    """A refusal of an earlier answer, which becomes the text of that answer."""

    type: Literal["refusal"] = Field(description="This part is a `refusal`.")
    refusal: str = Field(description="The text of the refusal.")

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[ContentPart | RefusalPart, Field(discriminator="type")]
Content = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[list[Part], Tag(PARTS)],
    union_of("expected a string or a list of parts", text_or(PARTS)),
]


def _text(content: str | list[ContentPart | RefusalPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class MessageItem(Lenient):
    """A message of the conversation."""

    type: Literal["message"] = Field("message", description="The type of the item; the default is `message`.")
    role: Literal["system", "developer", "user", "assistant"] = Field(description="The author of the message.")
    content: Content = Field(description="The text, as a string or in parts.")


class CallItem(Lenient):
    """A function call of an earlier answer."""

    type: Literal["function_call"] = Field(description="This item is a `function_call`.")
    call_id: str = Field(description="The id of the call, which its result repeats.")
    name: FunctionName = Field(description="The name of the function.")
    arguments: str = Field(description="The arguments: a JSON object, as a string.")


class ResultItem(Lenient):
    """The result of a function call."""

    type: Literal["function_call_output"] = Field(description="This item is a `function_call_output`.")
    call_id: str = Field(description="The id of an earlier `function_call`.")
    output: Content = Field(description="The result as text, a string or in parts.")


class ReasoningPart(Lenient):
    """A part of earlier reasoning, as text."""

    type: Literal["reasoning_text"] = Field("reasoning_text", description="The type of the part.")
    text: str = Field(description="The text of the part.")


class ReasoningItem(Lenient):
    """Reasoning of an earlier answer. It belongs to the answer or the calls after it; summaries are ignored."""

    type: Literal["reasoning"] = Field(description="This item is `reasoning`.")
    content: list[ReasoningPart] = Field(default=[], description="The reasoning, in parts.")


READ_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


class UnreadItem(Lenient):
    """An item of any other type, which is refused by its type."""

    type: str

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind == "item_reference":
            raise unsupported(NO_REFERENCES)
        items = f"items of type {quoted(kind)}" if isinstance(kind, str) else "such items"
        raise unsupported(f"{items} are not supported; supported are {', '.join(READ_ITEMS)}")


def _kind_of_item(value: Any) -> str:
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind in READ_ITEMS else UNREAD


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[SkipJsonSchema[UnreadItem], Tag(UNREAD)],
    Discriminator(_kind_of_item),
]


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Translate items to the messages of a chat request. Raises ApiError if a result belongs to no call before it."""
    messages: list[dict[str, Any]] = []
    called = set[str]()
    reasoning: dict[str, str] = {}  # the field of the next answer
    for number, item in enumerate(items):
        if isinstance(item, ReasoningItem):
            text = "".join(part.text for part in item.content)
            reasoning = {"reasoning_content": reasoning.get("reasoning_content", "") + text} if text else reasoning
        elif isinstance(item, MessageItem):
            thought = reasoning if item.role == "assistant" else {}
            messages.append({"role": item.role, "content": _text(item.content), **thought})
            reasoning = {}
        elif isinstance(item, CallItem):
            called.add(item.call_id)
            if not messages or messages[-1]["role"] != "assistant" or reasoning:
                messages.append({"role": "assistant", **reasoning})
                reasoning = {}
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif isinstance(item, ResultItem):
            if item.call_id not in called:
                param = f"input.{number}.call_id"
                message = f"no earlier function_call has the call_id {quoted(item.call_id)}; {NOT_STORED}"
                raise ApiError(400, "invalid_value", f"{param}: {message}", param=param)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
    return messages
