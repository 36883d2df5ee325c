"""DSPy: typed signatures. Its prompts say how to answer; a model that does not do so is asked again, with a schema."""

from __future__ import annotations

from typing import Any, Literal

import dspy
from pydantic import BaseModel, Field
from report import CODE, MAX_TOKENS, MODEL, URL, report, valid

lm = dspy.LM(
    f"openai/{MODEL}", api_base=URL, api_key="none", max_tokens=MAX_TOKENS, temperature=0, num_retries=0, cache=False
)
dspy.configure(lm=lm)


class Size(BaseModel):
    """A size."""

    n: int = Field(ge=1, le=9)
    how: Literal["loop", "call"]


class Sized(dspy.Signature):
    """How large?"""

    code: str = dspy.InputField()
    size: Size = dspy.OutputField()


def chat() -> None:
    assert lm(CODE)[0]


def responses() -> None:
    responses_lm: Any = lm.copy(model_type="responses")
    assert responses_lm(CODE)


def structured() -> None:
    size = dspy.Predict(Sized)(code=CODE).size
    valid(size.n, size.how)


def structured_by_the_server() -> None:
    with dspy.context(adapter=dspy.JSONAdapter()):
        structured()


report(chat=chat, responses=responses, structured=structured, structured_by_the_server=structured_by_the_server)
