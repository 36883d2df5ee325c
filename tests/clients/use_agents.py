"""openai-agents: an agent over chat completions, and over responses, which is its default."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from agents import (
    Agent,
    AgentOutputSchema,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from report import CODE, MAX_TOKENS, MODEL, URL, report, valid

set_tracing_disabled(True)


class Size(BaseModel):
    """A size."""

    n: int = Field(ge=1, le=9)
    how: Literal["loop", "call"]


def agent(kind: Any, **options: Any) -> Agent[None]:
    client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
    choice = {"tool_choice": "required"} if "tools" in options else {}
    settings = ModelSettings(max_tokens=MAX_TOKENS, temperature=0, **choice)
    return Agent(name="one", model=kind(MODEL, client), model_settings=settings, **options)


def tries(name: str, kind: Any) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []

    @function_tool
    def fibonacci(n: int, how: Literal["loop", "call"]) -> str:
        """The n-th number."""
        calls.append({"n": 1, "how": how})
        return "34"

    def calling() -> Agent[None]:
        """It must call. To this client a response that is cut off is an error, and what the demo says to a result has
        no end: there the call is all."""
        ends = {"tool_use_behavior": "stop_on_first_tool"} if kind is OpenAIResponsesModel else {}
        return agent(kind, tools=[fibonacci], **ends)

    def chat() -> None:
        assert Runner.run_sync(agent(kind), CODE).final_output

    def stream() -> None:
        async def pieces() -> int:
            result = Runner.run_streamed(agent(kind), CODE)
            return len([event async for event in result.stream_events() if event.type == "raw_response_event"])

        assert asyncio.run(pieces()) > 2

    def call_tools() -> None:
        Runner.run_sync(calling(), CODE)
        valid(**calls.pop())

    def stream_tools() -> None:
        async def whole() -> None:
            result = Runner.run_streamed(calling(), CODE)
            _ = [event async for event in result.stream_events()]

        asyncio.run(whole())
        valid(**calls.pop())

    def structured() -> None:
        size = Runner.run_sync(agent(kind, output_type=AgentOutputSchema(Size)), CODE).final_output
        valid(size.n, size.how)

    all_tries = {
        "": chat,
        "_stream": stream,
        "_tools": call_tools,
        "_tools_streamed": stream_tools,
        "_structured": structured,
    }
    return {name + what: attempt for what, attempt in all_tries.items()}


report(**tries("chat", OpenAIChatCompletionsModel), **tries("responses", OpenAIResponsesModel))
