"""What a model is told of functions, calls and results: by a template that knows them, or as texts."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.messages.request import Thought
from neuronpipe.services.gateway.answers.thinking_format import thinking_format
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.http.request_body import parse_body
from neuronpipe.services.gateway.openai.chat_prompt import Prompt, PromptWriter
from neuronpipe.services.gateway.openai.request_schema import ChatRequest
from neuronpipe.services.gateway.templates.call_format import DEFAULT, ONE_CALL
from neuronpipe.services.gateway.templates.template_pool import TemplatePool
from neuronpipe.services.gateway.templates.template_process import prepare

from tests.unit.test_call_formats import BARE, BLOCKS, ENDING, FRAMED, HARMONY, LIST

PLAIN = """{%- for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
STRICT = "{%- for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('take turns') }}{% endif %}{% endfor %}"
)
DEAF = "{%- set messages = messages | rejectattr('role', 'equalto', 'system') | list %}"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": WEATHER}}]
CALL = {"id": "call_7", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
USER = {"role": "user", "content": "Rain?"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_7", "content": "12 mm"}
TURN: list[dict[str, Any]] = [USER, CALLING, RESULT]


class InThisProcess:
    """Does the work of a helper process here."""

    def __init__(self) -> None:
        self._work = prepare(b"")

    async def run(self, model: str, job: bytes) -> bytes:
        return self._work(job)


def prompt(template: str | None, messages: list[dict[str, Any]], *, marked: bool = False, **more: Any) -> Prompt:
    chat = None if template is None else SimpleNamespace(begin="<s>", end="</s>")
    package = SimpleNamespace(manifest=SimpleNamespace(chat=chat, name="m"), chat_template=lambda: template)
    more |= {"response_format": {"type": "json_object"}} if marked else {}
    body = parse_body(json.dumps({"messages": messages, **more}).encode(), ChatRequest)
    chat = PromptWriter(cast(Package, package))
    chat.templates = cast(TemplatePool, InThisProcess())
    return asyncio.run(chat.write_prompt(body))


def test_a_template_that_knows_tools_writes_all_of_it() -> None:
    made = prompt(BLOCKS, TURN, tools=TOOLS)
    assert made.answer.calls.by_template
    assert json.dumps(TOOLS) in made.text
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}' in made.text
    assert made.text.endswith("<|im_start|>tool\n12 mm<|im_end|>\n<|im_start|>assistant\n")
    assert "You can call functions" not in made.text


def test_without_tools_a_prompt_says_nothing_of_them() -> None:
    for more in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        for template in (BLOCKS, PLAIN, None):
            assert "weather" not in prompt(template, [USER], **more).text
    assert '"arguments": {"city": "Oslo"}' in prompt(BLOCKS, TURN).text  # what was called stays said


def test_a_template_that_counts_on_a_list_of_tools_writes_conversations_without_any() -> None:
    assert prompt(ENDING, [USER]).text == "[user]Rain?<|eot|>[assistant]"
    assert prompt(ENDING, TURN).text.endswith(
        '<function=weather>{"city": "Oslo"}</function><|eom|>[result]12 mm[assistant]'
    )
    assert "You can call functions" in prompt(ENDING.replace("function=", ""), [USER], tools=TOOLS).text


def test_what_may_be_called_does_not_change_the_prompt() -> None:
    tools = [*TOOLS, {"type": "function", "function": {"name": "f"}}]
    named = {"type": "function", "function": {"name": "f"}}
    for template in (BLOCKS, PLAIN, None):
        texts = {prompt(template, [USER], tools=tools, tool_choice=one).text for one in ("auto", "required", named)}
        assert len(texts) == 1


def test_ids_are_as_the_template_wants_them_and_always_the_same() -> None:
    ids = [
        prompt(LIST, [USER, {**CALLING, "tool_calls": [{**CALL, "id": id_}]}], tools=TOOLS).text.partition('"id": "')[2]
        for id_ in ("abcDEF123", "call_7", "call_7", "call_8")
    ]
    assert ids[0].startswith('abcDEF123"')
    assert ids[1] == ids[2] != ids[3]
    assert ids[1][:9].isalnum()


def test_arguments_are_an_object_or_text_as_the_template_takes_them() -> None:
    assert '```json\n{"city": "Oslo"}\n```' in prompt(FRAMED, TURN, tools=TOOLS).text
    cut = {**CALLING, "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": '{"city": "Os'}}]}
    assert '{"city": "Os\n```' in prompt(FRAMED, [USER, cut], tools=TOOLS).text
    assert json.dumps('{"city": "Os') in prompt(BLOCKS, [USER, cut], tools=TOOLS).text


def test_a_result_has_the_name_of_its_function() -> None:
    template = BLOCKS.replace("m.role + '\n'", "m.role + (m.name or '') + '\n'")
    assert "<|im_start|>toolweather\n12 mm" in prompt(template, TURN, tools=TOOLS).text


def test_text_that_is_json_cannot_be_told_from_calls_without_a_marker() -> None:
    assert prompt(BARE, [USER], tools=TOOLS).answer.calls.marker == ""
    made = prompt(BARE, [USER], tools=TOOLS, marked=True)
    assert made.answer.calls == DEFAULT
    assert "You can call functions" in made.text
    assert prompt(BLOCKS, [USER], tools=TOOLS, marked=True).answer.calls.by_template


def test_a_model_that_knows_no_tools_is_told_of_them_in_texts() -> None:
    made = prompt(PLAIN, [{"role": "system", "content": "Be brief."}, *TURN, USER], tools=TOOLS)
    assert made.answer.calls == DEFAULT
    system, rest = made.text.split("</system>")
    assert system.startswith("<system>Be brief.\n\nYou can call functions.")
    assert json.dumps(TOOLS[0]["function"]) in system
    assert DEFAULT.written([("NAME", "ARGUMENTS")]) in system
    assert rest == (
        '<user>Rain?</user><assistant><tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
        "</assistant><user><tool_response>\n12 mm\n</tool_response>\nRain?</user><assistant>"
    )
    assert prompt(PLAIN, TURN, tools=TOOLS).text.startswith("<system>You can call functions.")


def test_several_results_are_one_message_and_text_stands_before_calls() -> None:
    two = {"role": "assistant", "content": "Well.", "tool_calls": [CALL, {**CALL, "id": "call_8"}]}
    made = prompt(STRICT + PLAIN, [USER, two, RESULT, {**RESULT, "tool_call_id": "call_8", "content": "3 mm"}]).text
    assert "<assistant>Well.\n<tool_call>\n" in made
    assert made.count("</tool_call>") == 2
    assert made.endswith(
        "<user><tool_response>\n12 mm\n</tool_response>\n<tool_response>\n3 mm\n</tool_response></user><assistant>"
    )


@pytest.mark.parametrize("template", [STRICT + PLAIN, DEAF + PLAIN], ids=["refusing", "leaving out"])
def test_where_there_is_no_system_message_the_user_tells_of_functions(template: str) -> None:
    made = prompt(template, [USER], tools=TOOLS).text
    assert made.startswith("<user>You can call functions.")
    assert made.endswith("\n\nRain?</user><assistant>")


THINKS = PLAIN.replace("<assistant>{% endif %}", "<assistant><think>\n{% endif %}{# </think> #}").replace(
    "{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}{{ reasoning_effort }}{{ mood }}{{ enable_thinking }}"
)


def test_reasoning_and_variables_reach_the_template() -> None:
    answer = {"role": "assistant", "content": "No.", "reasoning_content": "hm "}
    made = prompt(THINKS, [USER, answer, USER], reasoning_effort="high", chat_template_kwargs={"mood": 7})
    assert "<assistant>hm No.high7True</assistant>" in made.text
    assert (made.answer.thinking, made.answer.begins) == (thinking_format(THINKS), "reasoning")
    assert "hm " in prompt(HARMONY, [USER, CALLING | {"reasoning": "hm "}, RESULT], tools=TOOLS).text


@pytest.mark.parametrize(
    "more", [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}, {"marked": True}]
)
def test_a_prompt_that_the_template_ends_inside_of_reasoning_goes_on_with_the_answer(more: dict[str, Any]) -> None:
    made = prompt(THINKS, [USER], **more)
    assert made.text.endswith("False</user><assistant><think>\n\n</think>\n\n")
    assert made.answer.begins == "answer"


def test_a_begun_answer_is_continued_where_it_was() -> None:
    begun = {"role": "assistant", "content": "", "reasoning_content": "Let me"}
    made = prompt(THINKS, [USER, begun], continue_final_message=True)
    assert made.text.endswith("<assistant><think>\nLet me")
    assert made.answer.begins == "reasoning"
    made = prompt(HARMONY, [USER, begun | {"content": "It"}], continue_final_message=True)
    assert made.text.endswith("Let me<|end|><|start|>assistant<|channel|>final<|message|>It")
    assert made.answer.begins == "content"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}", "[user] Rain?[assistant] Well, it "),
        (PLAIN.replace("{{ m.content }}", "{{ m.content | trim }}"), "<user>Rain?</user><assistant>Well, it"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}> ", "Rain?> Well, it "),
    ],
    ids=["a blank before answers", "trimmed", "no answers"],
)
def test_a_begun_answer_stands_where_the_template_writes_answers(template: str, expected: str) -> None:
    """As in transformers; a template that leaves answers out gets the answer at the end of its prompt."""
    begun = {"role": "assistant", "content": "Well, it "}
    made = prompt(template, [USER, begun], continue_final_message=True)
    assert made.text == expected


def test_the_grammar_of_calls_admits_reasoning_unless_it_is_turned_off() -> None:
    made = prompt(THINKS, [USER], tools=TOOLS)
    assert made.calls is not None
    assert (made.calls.thoughts, made.calls.in_thought) == ((Thought(before="<think>", after="</think>"),), True)
    made = prompt(HARMONY, [USER], tools=TOOLS)
    assert made.calls is not None
    assert made.calls.opening == "<|channel|>final<|message|>"
    assert [thought.before for thought in made.calls.thoughts] == [
        "<|channel|>analysis<|message|>",
        "<|channel|>commentary<|message|>",
    ]
    for template in (THINKS, HARMONY):
        for more in ({"reasoning_effort": "none"}, {"marked": True}):
            made = prompt(template, [USER], tools=TOOLS, **more)
            assert made.calls is not None
            assert made.calls.thoughts == ()


def test_a_call_whose_text_and_reasoning_a_template_refuses_together_is_written_without_the_reasoning() -> None:
    both = {**CALLING, "content": "I look.", "reasoning_content": "hm"}
    assert "hm" not in prompt(HARMONY, [USER, both, RESULT], tools=TOOLS).text


def test_what_a_template_refuses_is_refused() -> None:
    with pytest.raises(ApiError, match="refuses this: take turns"):
        prompt(STRICT + PLAIN, [USER, USER], tools=TOOLS)


def test_a_base_model_is_told_in_lines_and_makes_one_call() -> None:
    made = prompt(None, TURN, tools=TOOLS)
    assert made.answer.calls == ONE_CALL
    assert made.frame
    assert made.text.startswith("You can call functions.")
    assert "several" not in made.text
    assert made.text.endswith("\n</tool_call>\n<tool_response>\n12 mm\n</tool_response>")
