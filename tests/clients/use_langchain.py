"""LangChain: ChatOpenAI with what it does unless told otherwise, and its agent."""

from __future__ import annotations

from typing import Any, Literal

from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from report import CODE, MAX_TOKENS, MODEL, URL, report, valid

model = ChatOpenAI(base_url=URL, api_key="none", model=MODEL, max_tokens=MAX_TOKENS, temperature=0, max_retries=0)


class Size(BaseModel):
    """A size."""

    n: int = Field(ge=1, le=9)
    how: Literal["loop", "call"]


@tool(args_schema=Size)
def fibonacci(n: int, how: str) -> int:
    """The n-th number."""
    return 34


def chat() -> None:
    answer = model.invoke(CODE)
    assert answer.content
    assert answer.usage_metadata


def stream() -> None:
    pieces = list(model.stream(CODE, stream_usage=True))
    assert len(pieces) > 2
    assert sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata)


def conversation(answer: Any) -> None:
    """Checks the calls, and sends their results back."""
    assert answer.tool_calls
    assert not answer.invalid_tool_calls
    results = []
    for call in answer.tool_calls:
        valid(**call["args"])
        results.append(ToolMessage(str(fibonacci.invoke(call["args"])), tool_call_id=call["id"]))
    last = model.bind_tools([fibonacci]).invoke([HumanMessage(CODE), answer, *results])
    assert last.response_metadata["finish_reason"] in ("stop", "length", "tool_calls")


def call_tools() -> None:
    conversation(model.bind_tools([fibonacci], tool_choice="any").invoke(CODE))


def stream_tools() -> None:
    whole = AIMessageChunk("")
    for piece in model.bind_tools([fibonacci], tool_choice="fibonacci").stream(CODE):
        whole += piece
    conversation(whole)


def structured() -> None:
    size = model.with_structured_output(Size).invoke(CODE)
    valid(size.n, size.how)


def structured_by_a_function() -> None:
    size = model.with_structured_output(Size, method="function_calling").invoke(CODE)
    valid(size.n, size.how)


def responses() -> None:
    assert model.model_copy(update={"use_responses_api": True}).invoke(CODE).text


report(
    chat=chat,
    stream=stream,
    tools=call_tools,
    tools_streamed=stream_tools,
    structured=structured,
    structured_by_a_function=structured_by_a_function,
    responses=responses,
)
