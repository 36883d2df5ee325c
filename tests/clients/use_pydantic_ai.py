"""pydantic-ai: agents with tools and with typed output, which it asks for as a tool that must be called."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelSettings, NativeOutput, RunContext, ToolDefinition
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from report import CODE, MAX_TOKENS, MODEL, URL, report, valid

provider = OpenAIProvider(base_url=URL, api_key="none")
model = OpenAIChatModel(MODEL, provider=provider)
MOST_TRIES = 20


class Size(BaseModel):
    """A size."""

    n: int = Field(ge=1, le=9)
    how: Literal["loop", "call"]


def agent(output: Any = str, model: Any = model) -> Agent[None, Any]:
    return Agent(model, output_type=output, model_settings={"max_tokens": MAX_TOKENS, "temperature": 0}, retries=0)


def chat() -> None:
    assert agent().run_sync(CODE).output


def stream() -> None:
    async def pieces() -> list[str]:
        async with agent().run_stream(CODE) as result:
            return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]

    assert len(asyncio.run(pieces())) > 2


def with_function(calls: list[int]) -> Agent[None, Size]:
    """Calls the function once at most, and answers: a model like the demo draws at random which comes first."""
    one = agent(Size)

    async def unless_called(context: RunContext[None], definition: ToolDefinition) -> ToolDefinition | None:
        return None if calls else definition

    @one.tool_plain(name="fibonacci", prepare=unless_called)
    def fibonacci(n: Annotated[int, Field(ge=1, le=9)]) -> int:
        """The n-th number."""
        calls.append(n)
        return 34

    return one


def call_tools() -> None:
    calls: list[int] = []
    for seed in range(MOST_TRIES):
        size = with_function(calls).run_sync(CODE, model_settings={"seed": seed, "temperature": 1}).output
        valid(size.n, size.how)
        if calls:
            return
    raise AssertionError("the function was never called")


def stream_tools() -> None:
    async def last(seed: int, calls: list[int]) -> Size:
        settings: ModelSettings = {"seed": seed, "temperature": 1}
        async with with_function(calls).run_stream(CODE, model_settings=settings) as result:
            return [one async for one in result.stream_output(debounce_by=None)][-1]

    calls: list[int] = []
    for seed in range(MOST_TRIES):
        size = asyncio.run(last(seed, calls))
        valid(size.n, size.how)
        if calls:
            return
    raise AssertionError("the function was never called")


def structured() -> None:
    size = agent(Size).run_sync(CODE).output
    valid(size.n, size.how)


def structured_by_the_server() -> None:
    size = agent(NativeOutput(Size)).run_sync(CODE).output
    valid(size.n, size.how)


def responses() -> None:
    assert agent(model=OpenAIResponsesModel(MODEL, provider=provider)).run_sync(CODE).output


def responses_structured() -> None:
    size = agent(Size, OpenAIResponsesModel(MODEL, provider=provider)).run_sync(CODE).output
    valid(size.n, size.how)


report(
    chat=chat,
    stream=stream,
    tools=call_tools,
    tools_streamed=stream_tools,
    structured=structured,
    structured_by_the_server=structured_by_the_server,
    responses=responses,
    responses_structured=responses_structured,
)
