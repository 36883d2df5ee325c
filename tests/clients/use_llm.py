"""llm, the command and its library, told of the server in its file of models."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from report import CODE, MAX_TOKENS, MODEL, URL, report, valid

home = Path(tempfile.mkdtemp(prefix="llm-"))
os.environ["LLM_USER_PATH"] = str(home)
(home / "extra-openai-models.yaml").write_text(
    f"- model_id: demo\n  model_name: {MODEL}\n  api_base: {URL}\n  supports_schema: true\n  supports_tools: true\n"
    f"- model_id: plain\n  model_name: {MODEL}\n  api_base: {URL}\n  completion: true\n"
)

import llm  # noqa: E402  it reads the variable when it is imported

model = llm.get_model("demo")
model.key = "none"


def chat() -> None:
    assert model.prompt(CODE, stream=False, max_tokens=MAX_TOKENS).text()


def stream() -> None:
    assert len(list(model.prompt(CODE, max_tokens=MAX_TOKENS))) > 2


def fibonacci(n: int) -> str:
    """The n-th number."""
    return "34"


def call_tools() -> None:
    """The demo may answer with a call or with text; the server takes and gives both."""
    answers = list(model.chain(CODE, tools=[fibonacci], options={"max_tokens": MAX_TOKENS}))
    assert answers


def structured() -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}, "how": {"enum": ["loop", "call"]}},
        "required": ["n", "how"],
    }
    valid(**json.loads(model.prompt(CODE, schema=schema, stream=False, max_tokens=MAX_TOKENS).text()))


def completions() -> None:
    plain = llm.get_model("plain")
    plain.key = "none"
    assert plain.prompt(CODE, max_tokens=8).text()


report(chat=chat, stream=stream, tools=call_tools, structured=structured, completions=completions)
