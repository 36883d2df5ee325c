"""litellm, which many programs use to speak to any server."""

from __future__ import annotations

import json
from typing import Any

import litellm
from pydantic import BaseModel, Field
from report import CODE, MAX_TOKENS, MODEL, PARAMETERS, URL, WORDS, report, valid

request: dict[str, Any] = {
    "model": f"openai/{MODEL}",
    "api_base": URL,
    "api_key": "none",
    "messages": [{"role": "user", "content": CODE}],
    "max_tokens": MAX_TOKENS,
    "temperature": 0,
    "num_retries": 0,
}
tools: list[Any] = [{"type": "function", "function": {"name": "fibonacci", "parameters": PARAMETERS}}]


class Size(BaseModel):
    """Follows PARAMETERS."""

    n: int = Field(ge=1, le=9)
    how: str = Field(json_schema_extra={"enum": [*WORDS]})


def chat() -> None:
    assert litellm.completion(**request).choices[0].message.content


def stream() -> None:
    pieces = list(litellm.completion(**request, stream=True, stream_options={"include_usage": True}))
    assert litellm.stream_chunk_builder(pieces).choices[0].message.content


def conversation(answer: Any) -> None:
    """Checks the calls, and sends their results back."""
    messages = [*request["messages"], answer]
    assert answer.tool_calls
    for call in answer.tool_calls:
        valid(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "34"})
    last = litellm.completion(**request | {"messages": messages}, tools=tools)
    assert last.choices[0].finish_reason in ("stop", "length", "tool_calls")


def call_tools() -> None:
    conversation(litellm.completion(**request, tools=tools, tool_choice="required").choices[0].message)


def stream_tools() -> None:
    pieces = list(litellm.completion(**request, tools=tools, tool_choice="required", stream=True))
    conversation(litellm.stream_chunk_builder(pieces).choices[0].message)


def structured() -> None:
    size = json.loads(litellm.completion(**request, response_format=Size).choices[0].message.content)
    valid(**size)


def responses() -> None:
    options = {name: request[name] for name in ("model", "api_base", "api_key")}
    assert litellm.responses(**options, input=CODE, max_output_tokens=MAX_TOKENS).output


def completions() -> None:
    options = {name: request[name] for name in ("api_base", "api_key", "max_tokens")}
    assert litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt=CODE, **options).choices[0].text


report(
    chat=chat,
    stream=stream,
    tools=call_tools,
    tools_streamed=stream_tools,
    structured=structured,
    responses=responses,
    completions=completions,
)
