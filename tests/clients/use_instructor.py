"""instructor: typed answers, which it asks for as a tool; and piece by piece."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel, Field
from report import CODE, MAX_TOKENS, MODEL, URL, report, valid

request: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": CODE}], "max_tokens": MAX_TOKENS}


class Size(BaseModel):
    """A size."""

    n: int = Field(ge=1, le=9)
    how: Literal["loop", "call"]


def client(**options: Any) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=URL, api_key="none", max_retries=0), **options)


def structured() -> None:
    size = client().chat.completions.create(**request, response_model=Size)
    valid(size.n, size.how)


def structured_streamed() -> None:
    size = list(client().chat.completions.create_partial(**request, response_model=Size))[-1]
    valid(size.n, size.how)


def structured_by_the_server() -> None:
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
        size = client(mode=mode).chat.completions.create(**request, response_model=Size)
        valid(size.n, size.how)


report(
    structured=structured, structured_streamed=structured_streamed, structured_by_the_server=structured_by_the_server
)
