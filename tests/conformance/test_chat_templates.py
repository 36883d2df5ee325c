"""Chat templates of widely used models: prompts are those of transformers, and the formats of answers are recognized.

The templates in chat_templates/ are written anew. They use the constructs of the published ones and write the same
text, except that long instructions are shorter. chat_templates/make.py writes the golden prompts.
"""

from __future__ import annotations

import asyncio
import datetime
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
from neuronpipe.plans.package.reader import Package
from neuronpipe.services.gateway.answers.answer_format import AnswerFormat, parse_answer
from neuronpipe.services.gateway.answers.thinking_format import thinking_format
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.http.request_body import parse_body
from neuronpipe.services.gateway.openai.chat_prompt import Prompt, PromptWriter
from neuronpipe.services.gateway.openai.request_schema import ChatRequest
from neuronpipe.services.gateway.templates import sandbox
from neuronpipe.services.gateway.templates.call_format import WILD, CallFormat
from neuronpipe.services.gateway.templates.format_probe import probe_format
from neuronpipe.services.gateway.templates.template_jobs import TemplateSource
from neuronpipe.services.gateway.templates.template_pool import TemplatePool
from neuronpipe.services.gateway.templates.template_process import prepare

from tests.conformance.chat_templates.conversations import CONVERSATIONS, Conversation

HERE = Path(__file__).parent / "chat_templates"
GOLDEN: dict[str, dict[str, dict[str, str]]] = json.loads((HERE / "prompts.json").read_text(encoding="utf-8"))


class Formats(NamedTuple):
    """The formats of a model's answers.

    thought: the tag that opens reasoning; None if the model does not think
    marker: the beginning of calls, "" if they have none; None if the default format is used
    several: True if an answer may have several calls
    as_text: True if the template takes calls as part of the content
    """

    thought: str | None = None
    marker: str | None = None
    several: bool = True
    as_text: bool = False


FORMATS = {
    "command-r7b": Formats("<|START_THINKING|>", "<|START_ACTION|>"),
    "deepseek-r1": Formats("<think>"),
    "deepseek-v3.1": Formats("<think>"),
    "exaone-4": Formats("<think>", "<tool_call>"),
    "gemma-4": Formats("<|channel>thought", "<|tool_call>"),
    "glm-4.5": Formats("<think>", "<tool_call>"),
    "glm-4.7": Formats("<think>", "<tool_call>"),
    "gpt-oss": Formats("<|channel|>analysis<|message|>", "<|channel|>commentary to=functions.", several=False),
    "granite-3.3": Formats("<think>", "<|tool_call|>", as_text=True),
    "granite-4": Formats(None, "<tool_call>"),
    "hermes-2-pro": Formats(None, "<tool_call>"),
    "hunyuan": Formats("<think>"),
    "kimi-k2": Formats(None, "<|tool_calls_section_begin|>"),
    "lfm2": Formats(None, "<|tool_call_start|>", as_text=True),
    "llama-3.1": Formats(None, "", several=False),
    "llama-3.2": Formats(None, "", several=False),
    "llama-4": Formats(None, "<|python_start|>"),
    "minimax-m2": Formats("<think>", "<minimax:tool_call>"),
    "ministral-3-reasoning": Formats("[THINK]", "[TOOL_CALLS]"),
    "mistral-small-3.2": Formats(None, "[TOOL_CALLS]"),
    "mistral-v3": Formats(None, "[TOOL_CALLS]"),
    "nemotron-3": Formats("<think>", "<tool_call>"),
    "olmo-3": Formats(None, "<function_calls>"),
    "phi-4": Formats("<think>"),
    "qwen2.5": Formats(None, "<tool_call>"),
    "qwen3": Formats("<think>", "<tool_call>"),
    "qwen3-coder": Formats(None, "<tool_call>"),
    "qwen3.5": Formats("<think>", "<tool_call>"),
    "qwq": Formats("<think>", "<tool_call>"),
    "smollm3": Formats("<think>", "<tool_call>", as_text=True),
}
WRITES_CALLS = [name for name, formats in FORMATS.items() if formats.marker is not None]


class Monday(datetime.datetime):
    """The date of the golden prompts."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Monday:
        return cls(2026, 3, 2, tzinfo=tz)


class InThisProcess:
    """Does the work of a helper process here."""

    def __init__(self) -> None:
        self._work = prepare(b"")

    async def run(self, model: str, job: bytes) -> bytes:
        return self._work(job)


def template_text(name: str) -> str:
    return (HERE / f"{name}.jinja").read_text(encoding="utf-8")


def call_format(name: str) -> CallFormat:
    return probe_format(sandbox.Template(TemplateSource(template_text(name), "<s>", "</s>"))).form


@pytest.fixture(params=sorted(GOLDEN))
def writer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, PromptWriter]:
    """A template's name and the writer of its prompts, on the date of the golden prompts."""
    monkeypatch.setattr(sandbox, "datetime", Monday)
    chat = SimpleNamespace(begin="<s>", end="</s>")
    text = template_text(request.param)
    package = SimpleNamespace(manifest=SimpleNamespace(chat=chat, name="m"), chat_template=lambda: text)
    prompts = PromptWriter(cast(Package, package))
    prompts.templates = cast(TemplatePool, InThisProcess())
    return request.param, prompts


def prompt(prompts: PromptWriter, conversation: Conversation) -> Prompt:
    messages = json.loads(json.dumps(conversation.messages))
    for call in (call for message in messages for call in message.get("tool_calls", [])):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    body: dict[str, Any] = {"messages": messages, "chat_template_kwargs": conversation.variables}
    body |= {"tools": conversation.tools} if conversation.tools else {}
    if conversation.continued:
        body["continue_final_message"] = True
    else:
        body["add_generation_prompt"] = conversation.answer
    return asyncio.run(prompts.write_prompt(parse_body(json.dumps(body).encode(), ChatRequest)))


def test_prompts_are_those_of_transformers(writer: tuple[str, PromptWriter]) -> None:
    name, prompts = writer
    formats, compared = FORMATS.get(name, Formats()), 0
    for title, golden in GOLDEN[name].items():
        conversation = CONVERSATIONS[title]
        has_calls = any("tool_calls" in message for message in conversation.messages)
        if (conversation.tools and formats.marker is None) or (has_calls and formats.as_text):
            continue  # tools, or calls, are told in text here, and lost in transformers
        compared += 1
        if "refused" in golden:
            with pytest.raises(ApiError) as caught:
                prompt(prompts, conversation)
            assert " ".join(golden["refused"].split()) in caught.value.message
            continue
        written = prompt(prompts, conversation)
        expected = golden["prompt"]
        if title == "thinking off" and written.answer.thinking is not None:
            # Reasoning that a template has no switch for ends at the end of the prompt.
            expected += written.answer.thinking.beginning(expected, thinks=False)[0]
        assert written.text == expected, title
    assert compared >= 10


def test_formats_of_answers_are_recognized(writer: tuple[str, PromptWriter]) -> None:
    name, prompts = writer
    formats = FORMATS.get(name, Formats())
    thinking = thinking_format(template_text(name))
    assert (None if thinking is None else thinking.open_tag) == formats.thought
    form = call_format(name)
    assert (form.marker if form.by_template else None) == formats.marker
    assert form.as_text == formats.as_text
    if formats.marker is None:
        if "refused" not in GOLDEN[name]["tools"]:
            assert "You can call functions" in prompt(prompts, CONVERSATIONS["tools"]).text
    else:
        assert bool(form.next) == formats.several


@pytest.mark.parametrize("name", [name for name in WRITES_CALLS if name != "gpt-oss"])
def test_calls_that_a_template_writes_are_parsed_as_these_calls(name: str) -> None:
    """gpt-oss is left out: its template writes another order than the model."""
    form, formats = call_format(name), FORMATS[name]
    template = sandbox.Template(TemplateSource(template_text(name), "<s>", "</s>"))
    calls = [("call00001", "look_up.all", '{"of": "a }]\\"}", "n": 3}'), ("call00002", "f", '{"deep": [{"x": {}}]}')]
    calls = calls if formats.several else calls[:1]
    question = {"role": "user", "content": "Which one?"}
    text = template.render([question, form.message("", calls)], tools=[], answer=False).partition("Which one?")[2]
    text = text[text.index(form.before.partition(WILD)[0]) :]
    _, content, parsed, complete = parse_answer(text, AnswerFormat(calls=form))
    assert content == ""
    assert complete
    assert [(call.name, json.loads(call.arguments)) for call in parsed] == [(n, json.loads(a)) for _, n, a in calls]
