"""LlamaIndex, with its class for servers like OpenAI's."""

from __future__ import annotations

from typing import Any, Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field
from report import CODE, MAX_TOKENS, MODEL, URL, report, valid


class Size(BaseModel):
    """A size."""

    n: int = Field(ge=1, le=9)
    how: Literal["loop", "call"]


def model(**options: Any) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=URL,
        api_key="none",
        max_tokens=MAX_TOKENS,
        temperature=0,
        max_retries=0,
        **{"is_chat_model": True, "is_function_calling_model": True, **options},
    )


def fibonacci(n: int, how: str) -> str:
    """The n-th number."""
    return "34"


tool = FunctionTool.from_defaults(fibonacci, fn_schema=Size)
messages = [ChatMessage(role="user", content=CODE)]


def chat() -> None:
    assert model().chat(messages).message.content


def stream() -> None:
    assert len(list(model().stream_chat(messages))) > 2


def conversation(answer: Any) -> None:
    """Checks the calls, and sends their results back."""
    calls = model().get_tool_calls_from_response(answer)
    results = []
    for call in calls:
        valid(**call.tool_kwargs)
        results.append(ChatMessage(role="tool", content="34", additional_kwargs={"tool_call_id": call.tool_id}))
    assert model().chat([*messages, answer.message, *results]).message


def call_tools() -> None:
    conversation(model().chat_with_tools([tool], chat_history=messages, tool_required=True))


def stream_tools() -> None:
    conversation(list(model().stream_chat_with_tools([tool], chat_history=messages, tool_required=True))[-1])


def structured() -> None:
    size: Any = model().as_structured_llm(Size).chat(messages).raw
    valid(size.n, size.how)


def structured_by_the_server() -> None:
    size: Any = model(should_use_structured_outputs=True).as_structured_llm(Size).chat(messages).raw
    valid(size.n, size.how)


def completions() -> None:
    assert model(is_chat_model=False).complete(CODE).text


report(
    chat=chat,
    stream=stream,
    tools=call_tools,
    tools_streamed=stream_tools,
    structured=structured,
    structured_by_the_server=structured_by_the_server,
    completions=completions,
)
