"""The request models of a conversation's messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.http.schema_base import (
    IGNORED,
    PARTS,
    TEXT,
    RequestModel,
    conflict,
    missing_parameter,
    text_or,
    union_of,
)
from neuronpipe.services.gateway.openai.tools import MAX_TOOLS, CalledFunction, ToolCall
from neuronpipe.services.gateway.templates.messages import ChatTurn
from pydantic import ConfigDict, Field, Tag, model_validator


class TextPart(RequestModel):
    """A part of a message's content. Only text is supported, no images or audio."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text"] = Field(description="The only supported type is `text`.")
    text: str = Field(description="The text of the part.")


_CONTENT = {"type": ["string", "array"]}
_NO_CALLS = {"maxItems": 0}
# The combinations of fields that `_check_fields` accepts, for the OpenAPI document.
_MESSAGES = [
    {
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant"]},
            "content": _CONTENT,
            "tool_calls": _NO_CALLS,
        },
        "required": ["content"],
    },
    {
        "properties": {"role": {"const": "assistant"}, "tool_calls": {"type": "array", "minItems": 1}},
        "required": ["tool_calls"],
    },
    *(
        {
            "properties": {"role": {"const": "assistant"}, name: {"type": "string", "minLength": 1}},
            "required": [name],
        }
        for name in ("reasoning_content", "reasoning")
    ),
    {
        "properties": {"role": {"const": "assistant"}, "function_call": {"type": "object"}, "tool_calls": _NO_CALLS},
        "required": ["function_call"],
    },
    {
        "properties": {
            "role": {"const": "function"},
            "content": _CONTENT,
            "name": {"type": "string"},
            "tool_calls": _NO_CALLS,
        },
        "required": ["content", "name"],
    },
    {
        "properties": {
            "role": {"const": "tool"},
            "content": _CONTENT,
            "tool_call_id": {"type": "string"},
            "tool_calls": _NO_CALLS,
        },
        "required": ["content", "tool_call_id"],
    },
]


class ChatMessage(RequestModel):
    """A message of the conversation."""

    model_config = ConfigDict(json_schema_extra={"anyOf": _MESSAGES})  # type: ignore[dict-item]

    role: Literal["system", "developer", "user", "assistant", "tool", "function"] = Field(
        description="The author of the message. Templates get `developer` as `system` and `function`, the older form "
        "of `tool`, as `tool`."
    )
    content: (
        Annotated[
            Annotated[str, Tag(TEXT)] | Annotated[list[TextPart], Tag(PARTS)],
            union_of("expected a string or a list of parts", text_or(PARTS)),
        ]
        | None
    ) = Field(None, description="The text, as a string or in parts. It is optional beside calls and reasoning.")
    name: str | None = Field(
        None,
        description="The name of the author, which some templates write. With the role `function`, the required name "
        "of the function that this message is the result of.",
    )
    tool_calls: list[ToolCall] = Field(
        default=[], max_length=MAX_TOOLS, description="The calls of the assistant in this message."
    )
    tool_call_id: str | None = Field(
        None, description="The id of the call that this message is the result of; required with the role `tool`."
    )
    reasoning_content: str | None = Field(
        None, description="What the assistant thought before it answered; templates decide whether the model reads it."
    )
    reasoning: str | None = Field(None, description="Another name of `reasoning_content`, which takes precedence.")
    refusal: str | None = Field(None, description=IGNORED)
    audio: None = Field(None, description="Audio is not supported; null is accepted.")
    function_call: CalledFunction | None = Field(
        None, description="The older form of `tool_calls`: the call of the assistant in this message."
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_notes(cls, value: Any) -> Any:
        """Drop unknown fields of the assistant's messages: clients send them back with notes of their own."""
        if isinstance(value, dict) and value.get("role") == "assistant":
            return {name: item for name, item in value.items() if name in cls.model_fields}
        return value

    @model_validator(mode="after")
    def _check_fields(self) -> ChatMessage:
        if self.thought and self.role != "assistant":
            raise conflict("reasoning_content", f"a message of the role {self.role} has no reasoning")
        if self.content is None and not (self.role == "assistant" and (self.calls or self.thought)):
            raise missing_parameter("content")
        if self.calls and self.role != "assistant":
            field = "tool_calls" if self.tool_calls else "function_call"
            raise conflict(field, f"a message of the role {self.role} cannot call functions")
        if self.tool_calls and self.function_call is not None:
            raise conflict("function_call", "tool_calls is the newer form of it; give one of the two")
        if self.role == "function" and self.name is None:
            raise missing_parameter("name")
        if self.role == "tool" and self.tool_call_id is None:
            raise missing_parameter("tool_call_id")
        return self

    @property
    def thought(self) -> str:
        """Return what the assistant thought before this message; empty if that is unknown."""
        return self.reasoning_content or self.reasoning or ""

    @property
    def text(self) -> str:
        """Return the content as one string; empty if there is none."""
        if self.content is None:
            return ""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    @property
    def calls(self) -> list[tuple[str, str, str]]:
        """Return the id, function name and arguments of each call."""
        if self.function_call is not None:
            return [(_older_id(self.function_call.name), self.function_call.name, self.function_call.arguments)]
        return [(call.id, call.function.name, call.function.arguments) for call in self.tool_calls]

    @property
    def turn(self) -> ChatTurn:
        """Return the message in the form that templates are given."""
        if self.role == "function":
            return ChatTurn("tool", self.text, self.name, _older_id(self.name or ""))
        return ChatTurn(self.role, self.text, self.name, self.tool_call_id, self.calls, self.thought)


def _older_id(name: str) -> str:
    """Return an id for the call of a function, and for its result, in the older form, which has no ids."""
    return f"call_{name}"


def is_begun_answer(messages: Sequence[Mapping[str, Any]], *, may_call: bool) -> bool:
    """Return True if the completion continues the last message, because it is the assistant's and has text.

    Raises ApiError if it cannot. For APIs in which a request does not say so.

    messages: those of the chat request
    may_call: True if the completion may call tools
    """
    if not messages:
        raise _refused_messages("expected a message with text")
    last = messages[-1]
    if last["role"] != "assistant":
        return False
    if last.get("tool_calls"):
        raise _refused_messages("the calls at the end have no results")
    if may_call:
        raise _refused_messages("a begun answer cannot be continued where tools may be called; end with the user's")
    if len(messages) == 1:
        raise _refused_messages("expected a message of the user before that of the assistant")
    return True


def _refused_messages(message: str) -> ApiError:
    return ApiError(400, "invalid_value", f"messages: {message}", param="messages")
