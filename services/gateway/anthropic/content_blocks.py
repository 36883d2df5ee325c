"""The conversation of a Messages API request: content blocks, and their translation to chat messages.

Results of tools are blocks of the user's messages. In a chat request each of them is a message of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from neuronpipe.protocol.errors import quoted
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.http.schema_base import (
    CALL,
    PARTS,
    RESULT,
    TEXT,
    THINKING,
    Lenient,
    conflict,
    text_or,
    union_of,
    unsupported,
)
from neuronpipe.services.gateway.openai.request_schema import MAX_MESSAGES
from neuronpipe.services.gateway.openai.tools import FunctionName
from pydantic import Field, Tag, model_validator

MAX_BLOCKS = MAX_MESSAGES  # of a request; a block becomes at most one message of the chat request
BLOCK_SEPARATOR = "\n"  # between the texts of blocks that become one text
TAGS = {"tool_use": CALL, "tool_result": RESULT, "thinking": THINKING, "redacted_thinking": THINKING}
ROLES = {"tool_use": "assistant", "tool_result": "user", "thinking": "assistant", "redacted_thinking": "assistant"}
READ_TYPES = ("text", *TAGS)
ONLY_TEXT = "the models of this server read only text"


class TextBlock(Lenient):
    """A block of text, the only kind of block in results and system messages."""

    type: Literal["text"] = Field(description="This block is `text`; images and documents are refused.")
    text: str = Field(description="The text of the block.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unread(cls, value: Any) -> Any:
        """Refuse a block of any type that is not read here: `_tag` takes it for a block of text."""
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != "text":
            reason = ONLY_TEXT if kind in ("image", "document") else f"supported are {', '.join(READ_TYPES)}"
            raise unsupported(f"blocks of type {quoted(kind)} are not supported here: {reason}")
        return value


TextContent = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS), Tag(PARTS)],
    union_of("expected a string or a list of blocks", text_or(PARTS)),
]


class ToolUseBlock(Lenient):
    """A call of a tool in an earlier answer."""

    type: Literal["tool_use"] = Field(description="This block is `tool_use`.")
    id: str = Field(description="The id of the call, which its result repeats.")
    name: FunctionName = Field(description="The name of the tool.")
    input: dict[str, Any] = Field(description="The arguments of the call.")

    def as_chat(self) -> dict[str, Any]:
        arguments = json.dumps(self.input, ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


class ToolResultBlock(Lenient):
    """The result of a call."""

    type: Literal["tool_result"] = Field(description="This block is `tool_result`.")
    tool_use_id: str = Field(description="The id of an earlier `tool_use`.")
    content: TextContent = Field("", description="The result as text, a string or in blocks.")
    is_error: bool = Field(
        False, description='True if the call failed; the model then reads "Error: " before the text.'
    )

    @property
    def text(self) -> str:
        return f"Error: {text_of(self.content)}" if self.is_error else text_of(self.content)


class ThinkingBlock(Lenient):
    """Thinking of an earlier answer. Signatures, and thinking that is redacted, are ignored."""

    type: Literal["thinking", "redacted_thinking"] = Field(description="The type of the block.")
    thinking: str = Field("", description="What the model thought.")


def _tag(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if not isinstance(value, dict | Lenient):
        return None
    return TAGS.get(kind, TEXT) if isinstance(kind, str) else TEXT


Block = Annotated[
    Annotated[TextBlock, Tag(TEXT)]
    | Annotated[ToolUseBlock, Tag(CALL)]
    | Annotated[ToolResultBlock, Tag(RESULT)]
    | Annotated[ThinkingBlock, Tag(THINKING)],
    union_of("expected a block: an object with a type", _tag),
]


class InputMessage(Lenient):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"] = Field(description="The author of the message.")
    content: Annotated[
        Annotated[str, Tag(TEXT)] | Annotated[list[Block], Field(max_length=MAX_BLOCKS), Tag(PARTS)],
        union_of("expected a string or a list of blocks", text_or(PARTS)),
    ] = Field(description="The text, as a string or in blocks, with calls of tools or their results.")

    @model_validator(mode="after")
    def _check_roles(self) -> InputMessage:
        for number, block in enumerate(self.blocks):
            if ROLES.get(block.type, self.role) != self.role:
                message = f"a message of the role {self.role} has no blocks of type {block.type}"
                raise conflict(f"content.{number}", message)
        return self

    @property
    def blocks(self) -> Sequence[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock]:
        """Return the blocks of the content; a string is one block of text."""
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    @property
    def text(self) -> str:
        return text_of([block for block in self.blocks if isinstance(block, TextBlock)])

    @property
    def thought(self) -> str:
        """Return what the model thought before this message."""
        thoughts = [block.thinking for block in self.blocks if isinstance(block, ThinkingBlock)]
        return BLOCK_SEPARATOR.join(filter(None, thoughts))

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Return the calls in the form of a chat message."""
        return [block.as_chat() for block in self.blocks if isinstance(block, ToolUseBlock)]


def text_of(content: str | Sequence[TextBlock]) -> str:
    """Return a content of text as one string."""
    return content if isinstance(content, str) else BLOCK_SEPARATOR.join(block.text for block in content)


def chat_messages(messages: Sequence[InputMessage]) -> list[dict[str, Any]]:
    """Translate messages to those of a chat request; answers without text and calls are left out.

    Raises ApiError if a result belongs to no call before it.
    """
    translated: list[dict[str, Any]] = []
    called_ids = set[str]()
    for number, message in enumerate(messages):
        if message.role == "user":
            translated += _of_user(message, called_ids, f"messages.{number}.content")
        elif message.role == "system":
            translated.append({"role": "system", "content": message.text})
        elif (calls := message.calls) or message.text:
            called_ids.update(call["id"] for call in calls)
            thought = {"reasoning_content": message.thought} if message.thought else {}
            translated.append({"role": "assistant", "content": message.text, "tool_calls": calls, **thought})
    return translated


def _of_user(message: InputMessage, called_ids: set[str], path: str) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat request that a message of the user becomes, in the order of its blocks.

    called_ids: the ids of the calls before it
    path: where its content is in the request
    """
    texts: list[TextBlock] = []
    for number, block in enumerate(message.blocks):
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolResultBlock):
            if block.tool_use_id not in called_ids:
                param = f"{path}.{number}.tool_use_id"
                reason = f"no earlier tool_use has the id {quoted(block.tool_use_id)}"
                raise ApiError(400, "invalid_value", f"{param}: {reason}", param=param)
            if texts:
                yield {"role": "user", "content": text_of(texts)}
                texts = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text}
    if texts or not message.blocks:
        yield {"role": "user", "content": text_of(texts)}
