"""OpenAI's own client: chat, streams, tools, its parsing helpers, responses."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
from pydantic import BaseModel, Field
from report import CODE, MAX_TOKENS, MODEL, PARAMETERS, URL, report, valid

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
request: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": MAX_TOKENS,
    "temperature": 0,
    "messages": [{"role": "user", "content": CODE}],
}
tools: list[Any] = [{"type": "function", "function": {"name": "fibonacci", "parameters": PARAMETERS}}]


class Size(BaseModel):
    """Follows PARAMETERS."""

    n: int = Field(ge=1, le=9)
    how: Literal["loop", "call"]


def chat() -> None:
    answer = client.chat.completions.create(**request)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= MAX_TOKENS


def stream() -> None:
    pieces = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert pieces[-1].usage


def call_tools() -> None:
    answer = client.chat.completions.create(**request, tools=tools, tool_choice="required").choices[0].message
    assert answer.tool_calls
    messages = [*request["messages"], answer]
    for call in answer.tool_calls:
        valid(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "34"})
    last = client.chat.completions.create(**request | {"messages": messages}, tools=tools)
    assert last.choices[0].finish_reason in ("stop", "length", "tool_calls")


def stream_tools() -> None:
    with client.chat.completions.stream(**request, tools=tools, tool_choice="required") as events:
        answer = events.get_final_completion().choices[0].message
    assert answer.tool_calls
    valid(**json.loads(answer.tool_calls[0].function.arguments))


def structured() -> None:
    parsed = client.chat.completions.parse(**request, response_format=Size).choices[0].message.parsed
    assert parsed
    valid(parsed.n, parsed.how)


def responses() -> None:
    assert client.responses.create(model=MODEL, input=CODE, max_output_tokens=MAX_TOKENS).output_text
    with client.responses.stream(model=MODEL, input=CODE, max_output_tokens=MAX_TOKENS) as events:
        assert [event for event in events if event.type == "response.output_text.delta"]


def response_structured() -> None:
    parsed = client.responses.parse(model=MODEL, input=CODE, text_format=Size).output_parsed
    assert parsed
    valid(parsed.n, parsed.how)


def completions() -> None:
    parsed = client.completions.create(model=MODEL, prompt=[CODE, CODE], max_tokens=8, logprobs=2, echo=True)
    assert len(parsed.choices) == 2
    assert parsed.choices[0].logprobs


report(
    chat=chat,
    stream=stream,
    tools=call_tools,
    tools_streamed=stream_tools,
    structured=structured,
    responses=responses,
    responses_structured=response_structured,
    completions=completions,
)
