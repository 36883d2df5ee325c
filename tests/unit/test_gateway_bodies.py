"""What requests may say: parameters that change nothing here, and errors that name what is wrong."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from neuronpipe.protocol.messages.request import MAX_TOKENS
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.http.request_body import parse_body
from neuronpipe.services.gateway.openai.answer_constraints import Constraint
from neuronpipe.services.gateway.openai.request_schema import (
    MAX_CHOICES,
    MAX_PROMPTS,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)

PROMPT: dict[str, Any] = {"prompt": "x"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
KINDS: dict[type[GenerationRequest], dict[str, Any]] = {CompletionRequest: PROMPT, ChatRequest: CHAT}
FUNCTION: dict[str, Any] = {"name": "f"}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
Refusal = tuple[str, str | None, str]


def chosen(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [chosen(name) for name in names]}}


def parsed(kind: type[GenerationRequest], **body: Any) -> Any:
    return parse_body(json.dumps(KINDS[kind] | body).encode(), kind)


def refusal(kind: type[GenerationRequest], **body: Any) -> Refusal:
    with pytest.raises(ApiError) as raised:
        parsed(kind, **body)
    problem = raised.value
    assert problem.status == 400
    assert "\n" not in problem.message
    return problem.code, problem.param, problem.message


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "harmless",
    [
        {"store": True},
        {"metadata": {"run": "7"}},
        {"service_tier": "auto"},
        {"user": "u"},
        {"safety_identifier": "u"},
        {"prompt_cache_key": "k"},
        {"prompt_cache_retention": "24h"},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"top_k": -1},
        {"max_tokens": -1},
        {"seed": -1},
        {"seed": 1 << 64},
        {"seed": -(10**40)},
    ],
    ids=json.dumps,
)
def test_what_changes_nothing_is_accepted(kind: type[GenerationRequest], harmless: dict[str, Any]) -> None:
    parsed(kind, **harmless)


@pytest.mark.parametrize(
    "harmless",
    [
        {"parallel_tool_calls": True},
        {"tools": []},
        {"tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False},
        {"reasoning_effort": "xhigh", "chat_template_kwargs": {"a": "b", "c": 1, "d": 1.5, "e": True, "f": None}},
        {"verbosity": "high"},
        {"modalities": ["text"]},
        {"max_completion_tokens": -1},
        {"max_tokens": 9, "max_completion_tokens": 9},
    ],
    ids=json.dumps,
)
def test_what_changes_nothing_in_a_chat_is_accepted(harmless: dict[str, Any]) -> None:
    parsed(ChatRequest, **harmless)


@pytest.mark.parametrize(
    "harmless", [{"echo": False}, {"suffix": ""}, {"best_of": 1}, {"best_of": 3, "n": 3, "stream": True}]
)
def test_what_changes_nothing_in_a_completion_is_accepted(harmless: dict[str, Any]) -> None:
    parsed(CompletionRequest, **harmless)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"suffix": "x", "echo": True}, "only without echo"),
        ({"suffix": "x", "prompt": [1, 2]}, "only after prompts that are strings"),
    ],
    ids=json.dumps,
)
def test_a_gap_is_between_two_texts_that_are_not_sent_back(asked: dict[str, Any], said: str) -> None:
    code, param, message = refusal(CompletionRequest, **asked)
    assert (code, param) == ("invalid_value", "suffix")
    assert said in message


def test_no_token_is_an_answer_to_an_echo_alone() -> None:
    assert parsed(CompletionRequest, max_tokens=0, echo=True, logprobs=1).max_tokens == 0
    code, param, message = refusal(CompletionRequest, max_tokens=0)
    assert (code, param) == ("invalid_value", "max_tokens")
    assert "0 only with echo" in message


def test_minus_one_means_no_limit() -> None:
    assert parsed(CompletionRequest, max_tokens=-1).max_tokens == MAX_TOKENS
    assert parsed(ChatRequest, max_completion_tokens=-1).max_completion_tokens == MAX_TOKENS
    for kind in KINDS:
        assert refusal(kind, max_tokens=0)[:2] == ("invalid_value", "max_tokens")
        assert refusal(kind, max_tokens=-2)[:2] == ("invalid_value", "max_tokens")
        assert refusal(kind, top_k=-2)[:2] == ("invalid_value", "top_k")


@pytest.mark.parametrize(
    ("asked", "code", "param"),
    [
        ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools.0.function"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "invalid_value", "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "invalid_value", "tools.0.function.name"),
        ({"tools": [TOOL, TOOL]}, "invalid_value", "tools"),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"tool_choice": "any", "tools": [TOOL]}, "invalid_value", "tool_choice"),
        ({"tool_choice": 7, "tools": [TOOL]}, "invalid_value", "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "missing_required_parameter", "tool_choice.function"),
        ({"tool_choice": chosen("g"), "tools": [TOOL]}, "invalid_value", "tool_choice"),
        ({"tool_choice": chosen("f")}, "invalid_value", "tool_choice"),
        ({"tool_choice": allowed("auto", "f", "g"), "tools": [TOOL]}, "invalid_value", "tool_choice"),
        ({"modalities": ["text", "audio"]}, "invalid_value", "modalities.1"),
        ({"store": "yes"}, "invalid_value", "store"),
        ({"metadata": "m"}, "invalid_value", "metadata"),
        ({"audio": {"voice": "v"}}, "unsupported_parameter", "audio"),
        ({"functions": [{}]}, "missing_required_parameter", "functions.0.name"),
        ({"functions": [FUNCTION, FUNCTION]}, "invalid_value", "functions"),
        ({"functions": [FUNCTION], "tools": [TOOL]}, "invalid_value", "functions"),
        ({"functions": [FUNCTION], "function_call": "required"}, "invalid_value", "function_call"),
        ({"functions": [FUNCTION], "function_call": {"name": "g"}}, "invalid_value", "function_call"),
        ({"function_call": {"name": "f"}}, "invalid_value", "function_call"),
        ({"function_call": {"name": "f"}, "tools": [TOOL]}, "invalid_value", "function_call"),
        ({"seed": 1.5}, "invalid_value", "seed"),
        ({"reasoning_effort": "As long as you like"}, "invalid_value", "reasoning_effort"),
        ({"chat_template_kwargs": {"messages": "x"}}, "invalid_value", "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"tools": None}}, "invalid_value", "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "invalid_value", "chat_template_kwargs.bos_token"),
        ({"chat_template_kwargs": {"a b": 1}}, "invalid_value", "chat_template_kwargs.a b"),
        ({"chat_template_kwargs": {f"a{n}": n for n in range(65)}}, "invalid_value", "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "x" * 5000}}, "invalid_value", "chat_template_kwargs.a"),
        ({"chat_template_kwargs": {"a": [1]}}, "invalid_value", "chat_template_kwargs.a"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_would_change_the_answer_is_refused(asked: dict[str, Any], code: str, param: str) -> None:
    assert refusal(ChatRequest, **asked)[:2] == (code, param)


@pytest.mark.parametrize(
    ("choice", "allowed", "required"),
    [(None, ["f", "g"], False), ("auto", ["f", "g"], False), ({"name": "g"}, ["g"], True)],
)
def test_functions_are_offered_as_tools_of_which_one_is_called(choice: Any, allowed: list[str], required: bool) -> None:
    offer = parsed(ChatRequest, functions=[FUNCTION, {"name": "g"}], function_call=choice).offer
    assert [function.name for function in offer.functions] == ["f", "g"]
    assert ([function.name for function in offer.allowed], offer.required) == (allowed, required)
    assert not offer.several
    assert parsed(ChatRequest, functions=[FUNCTION], function_call="none").offer is None


def test_a_call_and_a_result_in_the_older_form_belong_together() -> None:
    called = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    result = {"role": "function", "name": "f", "content": "4"}
    messages = parsed(ChatRequest, messages=[*CHAT["messages"], called, result]).messages
    call, answer = messages[1].turn, messages[2].turn
    ((id_, name, arguments),) = call.calls
    assert (name, arguments) == ("f", '{"a": 1}')
    assert (answer.role, answer.name, answer.tool_call_id, answer.text) == ("tool", "f", id_, "4")


@pytest.mark.parametrize(
    ("prompt", "param", "said"),
    [
        (["x"] * (MAX_PROMPTS + 1), "prompt", f"at most {MAX_PROMPTS} items, not {MAX_PROMPTS + 1}"),
        ([[1]] * (MAX_PROMPTS + 1), "prompt", f"at most {MAX_PROMPTS} items, not {MAX_PROMPTS + 1}"),
        ([], "prompt", "at least 1 item, not 0"),
        ([[1], []], "prompt.1", "at least 1 item, not 0"),
        (["x", 1], "prompt.1", "valid string"),
        ([1, "x"], "prompt.1", "valid integer"),
        ([True], "prompt", "a string, a list of token ids, or a list of either"),
        ({}, "prompt", "a string, a list of token ids, or a list of either"),
        (7, "prompt", "a string, a list of token ids, or a list of either"),
    ],
)
def test_a_wrong_prompt_is_told_what_is_wrong_with_it(prompt: Any, param: str, said: str) -> None:
    code, at, message = refusal(CompletionRequest, prompt=prompt)
    assert (code, at) == ("invalid_value", param)
    assert said in message


@pytest.mark.parametrize(
    ("content", "param", "said"),
    [
        ([{"type": "image_url", "image_url": {"url": "u"}}], ".0.type", "'text', not 'image_url'"),
        ([{"type": "text", "text": "x"}, {"type": "input_audio"}], ".1.type", "'text', not 'input_audio'"),
        (["x"], ".0", "an object"),
        (7, "", "expected a string or a list of parts"),
    ],
)
def test_a_wrong_part_of_a_message_is_told_what_is_wrong_with_it(content: Any, param: str, said: str) -> None:
    code, at, message = refusal(ChatRequest, messages=[{"role": "user", "content": content}])
    assert (code, at) == ("invalid_value", f"messages.0.content{param}")
    assert said in message


@pytest.mark.parametrize(
    ("message", "param", "said"),
    [
        ({"role": "assistant"}, "messages.0.content", "field required"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages.0.content", "field required"),
        ({"role": "user", "content": None, "tool_calls": [CALL]}, "messages.0.content", "field required"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages.0.tool_calls", "user cannot call functions"),
        ({"role": "tool", "content": "x"}, "messages.0.tool_call_id", "field required"),
        ({"role": "user", "content": "x", "notes": 1}, "messages.0.notes", "unsupported"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "messages.0.audio", "should be null"),
        ({"role": "user", "content": "x", "reasoning": "y"}, "messages.0.reasoning_content", "has no reasoning"),
        ({"role": "function", "content": "x"}, "messages.0.name", "field required"),
        ({"role": "function", "name": "f"}, "messages.0.content", "field required"),
        (
            {"role": "user", "content": "x", "function_call": {"name": "f", "arguments": ""}},
            "messages.0.function_call",
            "user cannot call functions",
        ),
        (
            {"role": "assistant", "tool_calls": [CALL], "function_call": {"name": "f", "arguments": ""}},
            "messages.0.function_call",
            "the newer form",
        ),
        (
            {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": {}}}]},
            "messages.0.tool_calls.0.function.arguments",
            "valid string",
        ),
    ],
)
def test_a_message_that_says_nothing_is_told_what_it_lacks(message: dict[str, Any], param: str, said: str) -> None:
    _, at, problem = refusal(ChatRequest, messages=[message])
    assert at == param
    assert said in problem


def test_an_answer_can_be_sent_back_as_clients_have_it() -> None:
    message = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None}
    message |= {"function_call": None, "tool_calls": [CALL | {"index": 0}], "provider_specific_fields": {"a": 1}}
    result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "4"}]}
    body = parsed(ChatRequest, messages=[*CHAT["messages"], message, result])
    assert [one.text for one in body.messages] == ["x", "", "4"]
    assert body.messages[1].calls == [("c", "f", "{}")]
    thought = [{"role": "assistant", "content": None, name: "hm"} for name in ("reasoning", "reasoning_content")]
    body = parsed(ChatRequest, messages=[*CHAT["messages"], *thought])
    assert [one.thought for one in body.messages] == ["", "hm", "hm"]


@pytest.mark.parametrize(
    ("asked", "allowed", "required", "several"),
    [
        ({}, ["f", "g"], False, True),
        ({"tool_choice": "auto"}, ["f", "g"], False, True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["f", "g"], True, False),
        ({"tool_choice": chosen("g")}, ["g"], True, False),
        ({"tool_choice": allowed("auto", "g", "g")}, ["g"], False, True),
        ({"tool_choice": allowed("required", "g", "f")}, ["g", "f"], True, True),
    ],
)
def test_what_may_be_called_and_how_often(asked: Any, allowed: list[str], required: bool, several: bool) -> None:
    tools = [TOOL, {"type": "function", "function": {"name": "g", "strict": True}, "cache_control": {}}]
    offer = parsed(ChatRequest, tools=tools, **asked).offer
    assert [one.name for one in offer.functions] == ["f", "g"]
    assert ([one.name for one in offer.allowed], offer.required, offer.several) == (allowed, required, several)


@pytest.mark.parametrize("asked", [{}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}])
def test_without_tools_nothing_is_called(asked: dict[str, Any]) -> None:
    assert parsed(ChatRequest, **asked).offer is None


def test_limits_are_named() -> None:
    assert f"less than or equal to {MAX_CHOICES}" in refusal(CompletionRequest, n=MAX_CHOICES + 1)[2]
    assert "at most 16 items, not 17" in refusal(CompletionRequest, stop=["x"] * 17)[2]
    assert f"less than or equal to {MAX_CHOICES}" in refusal(CompletionRequest, best_of=MAX_CHOICES + 1)[2]


@pytest.mark.parametrize(
    ("kind", "asked", "param", "said"),
    [
        (CompletionRequest, {"best_of": 2, "n": 4}, "best_of", "2 is less than n, 4"),
        (ChatRequest, {"continue_final_message": True}, "continue_final_message", "only when the last of several"),
        (CompletionRequest, {"best_of": 4, "n": 2, "stream": True}, "best_of", "more than n cannot be streamed"),
        (CompletionRequest, {"stream_options": {}}, "stream_options", "only with stream"),
        (ChatRequest, {"top_logprobs": 2}, "top_logprobs", "only with logprobs"),
        (ChatRequest, {"max_tokens": 8, "max_completion_tokens": 9}, "max_completion_tokens", "give one of the two"),
    ],
)
def test_a_parameter_that_contradicts_another_is_named(
    kind: type[GenerationRequest], asked: dict[str, Any], param: str, said: str
) -> None:
    code, at, message = refusal(kind, **asked)
    assert (code, at) == ("invalid_value", param)
    assert message.startswith(f"{param}: ")
    assert said in message


@pytest.mark.parametrize(
    "wrong",
    [
        {"y" * 10_000: 1},
        {"logit_bias": {"z" * 10_000: 1}},
        {"response_format": {"type": "t" * 10_000}},
        {"messages": [{"role": "r" * 10_000, "content": "x"}]},
    ],
    ids=["name", "key", "tag", "literal"],
)
def test_what_a_client_said_is_cut_where_it_is_quoted(wrong: dict[str, Any]) -> None:
    assert len(" ".join(map(str, refusal(ChatRequest, **wrong)))) < 500


def test_a_body_of_a_million_mistakes_is_refused_for_the_first() -> None:
    body = b'{"prompt": [1' + b',""' * 1_000_000 + b"]}"
    began = time.process_time()
    with pytest.raises(ApiError, match=r"prompt\.1"):
        parse_body(body, CompletionRequest)
    assert time.process_time() - began < 2  # collecting them all took 5 s and more than a gigabyte


GRAMMARS: list[tuple[dict[str, Any], Constraint]] = [
    ({"structured_outputs": {"json": {"type": "integer"}}}, Constraint('{"type": "integer"}', "json")),
    ({"structured_outputs": {"json": '{"type": "integer"}'}}, Constraint('{"type": "integer"}', "json")),
    ({"structured_outputs": {"json_object": True}}, Constraint("json", "json")),
    ({"structured_outputs": {"regex": "[0-9]+"}}, Constraint("[0-9]+", "regex")),
    ({"structured_outputs": {"choice": ["yes", 'a "b"']}}, Constraint('start: "yes" | "a \\"b\\""', "lark")),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Constraint('root ::= "a"', "gbnf")),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Constraint('start: "a"', "lark")),
    ({"grammar": 'root ::= "a"'}, Constraint('root ::= "a"', "gbnf")),
    ({"response_format": {"type": "json_object"}}, Constraint("json", "json")),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, Constraint("{}", "json")),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("asked", "constraint"), GRAMMARS, ids=str)
def test_what_an_answer_is_to_be_is_said_in_many_ways(
    kind: type[GenerationRequest], asked: dict[str, Any], constraint: Constraint
) -> None:
    assert parsed(kind, **asked).constraint == constraint


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"grammar": "x", "response_format": {"type": "json_object"}}, "grammar"),
    ],
    ids=json.dumps,
)
def test_an_answer_has_one_form(asked: dict[str, Any], param: str) -> None:
    assert refusal(CompletionRequest, **asked)[1] == param


def test_an_answer_that_is_continued_is_no_message_that_is_answered() -> None:
    talk = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one, "}]
    body = parsed(ChatRequest, messages=talk, continue_final_message=True)
    assert ([message.text for message in body.prompt_messages], body.begun_message) == (["count"], body.messages[-1])
    body = parsed(ChatRequest, messages=talk)
    assert ([message.text for message in body.prompt_messages], body.begun_message) == (["count", "one, "], None)
