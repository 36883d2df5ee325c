"""The request models of a conversation's messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

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
from neuronpipe.services.gateway.openai.tools import MAX_TOOLS, ToolCall
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

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="The author of the message. Templates get `developer` as `system`."
    )
    content: (
        Annotated[
            Annotated[str, Tag(TEXT)] | Annotated[list[TextPart], Tag(PARTS)],
            union_of("expected a string or a list of parts", text_or(PARTS)),
        ]
        | None
    ) = Field(None, description="The text, as a string or in parts. It is optional beside `tool_calls` and reasoning.")
    name: str | None = Field(None, description="The name of the author, which some templates write.")
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
    function_call: None = Field(None, description="The older form of `tool_calls`; null is accepted.")

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
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.thought)):
            raise missing_parameter("content")
        if self.tool_calls and self.role != "assistant":
            raise conflict("tool_calls", f"a message of the role {self.role} cannot call functions")
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
        return [(call.id, call.function.name, call.function.arguments) for call in self.tool_calls]
