"""Haystack's generators."""

from __future__ import annotations

from typing import Any, Literal

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import Tool
from haystack.utils import Secret
from pydantic import BaseModel, Field
from report import CODE, MAX_TOKENS, MODEL, PARAMETERS, URL, report, valid


class Size(BaseModel):
    """A size."""

    n: int = Field(ge=1, le=9)
    how: Literal["loop", "call"]


tool = Tool("fibonacci", "The n-th number.", PARAMETERS, lambda n, how: "34")
messages = [ChatMessage.from_user(CODE)]


def ask(messages: list[Any], generation: dict[str, Any] | None = None, **options: Any) -> Any:
    generator = OpenAIChatGenerator(
        api_key=Secret.from_token("none"),
        model=MODEL,
        api_base_url=URL,
        max_retries=0,
        generation_kwargs={"max_tokens": MAX_TOKENS, "temperature": 0, **(generation or {})},
        **options,
    )
    return generator.run(messages)["replies"][0]


def chat() -> None:
    assert ask(messages).text


def stream() -> None:
    pieces: list[StreamingChunk] = []
    assert ask(messages, streaming_callback=pieces.append).text
    assert len(pieces) > 2


def conversation(answer: Any) -> None:
    """Checks the calls, and sends their results back."""
    assert answer.tool_calls
    results = []
    for call in answer.tool_calls:
        valid(**call.arguments)
        results.append(ChatMessage.from_tool("34", call))
    assert ask([*messages, answer, *results], tools=[tool])


def call_tools() -> None:
    conversation(ask(messages, {"tool_choice": "required"}, tools=[tool]))


def stream_tools() -> None:
    conversation(ask(messages, {"tool_choice": "required"}, tools=[tool], streaming_callback=lambda piece: None))


def structured() -> None:
    size = Size.model_validate_json(ask(messages, {"response_format": Size}).text)
    valid(size.n, size.how)


report(chat=chat, stream=stream, tools=call_tools, tools_streamed=stream_tools, structured=structured)
