"""The Messages API: what a request is as a chat request, and what is refused with the name of its field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from neuronpipe.protocol.messages.request import MAX_TOKENS
from neuronpipe.services.gateway.anthropic.content_blocks import MAX_BLOCKS
from neuronpipe.services.gateway.anthropic.messages_api import CountTokensRequest, MessagesRequest
from neuronpipe.services.gateway.http.api_errors import ApiError, prompt_too_long
from neuronpipe.services.gateway.http.request_body import parse_body
from neuronpipe.services.gateway.openai.request_schema import ChatRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "f", "description": "d", "input_schema": SCHEMA}
USER = {"role": "user", "content": "hello"}
TOOL_USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "7"}
CACHED = {"cache_control": {"type": "ephemeral"}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def chat(**body: Any) -> ChatRequest:
    content = {"messages": [USER], "max_tokens": 8, **body}
    return parse_body(json.dumps(content).encode(), MessagesRequest).as_chat()


def conversation(**body: Any) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in chat(**body).messages]


def test_the_system_text_comes_before_the_messages() -> None:
    assert conversation() == [("user", "hello")]
    assert conversation(system="Be short.") == [("system", "Be short."), ("user", "hello")]


def test_blocks_of_text_are_joined_by_line_ends_and_their_notes_are_ignored() -> None:
    system = [text("Be short.") | CACHED, text("Be kind.")]
    messages = [{"role": "user", "content": [text("hel") | CACHED, text("lo") | {"citations": None}]}]
    assert conversation(system=system, messages=messages) == [("system", "Be short.\nBe kind."), ("user", "hel\nlo")]


def test_thinking_belongs_to_the_answer_after_it_and_is_nothing_alone() -> None:
    thinking = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"}]
    messages = [
        USER,
        {"role": "assistant", "content": [*thinking, text("hi")]},
        USER,
        {"role": "assistant", "content": thinking},
        USER,
    ]
    assert [message.thought for message in chat(messages=messages).messages] == ["", "hm", "", ""]
    assert conversation(messages=messages) == [
        ("user", "hello"),
        ("assistant", "hi"),
        ("user", "hello"),
        ("user", "hello"),
    ]


def test_calls_belong_to_the_answer_and_each_result_is_a_message() -> None:
    messages = [
        USER,
        {"role": "assistant", "content": [text("Let me see."), TOOL_USE | CACHED, {**TOOL_USE, "id": "t2"}]},
        {
            "role": "user",
            "content": [
                {**RESULT, "tool_use_id": "t2", "content": [text("8"), text("9")]} | CACHED,
                RESULT,
                text("Go on."),
            ],
        },
        {"role": "assistant", "content": [{**TOOL_USE, "id": "t3", "input": {"b": "ä\n"}}]},
        {"role": "user", "content": [text("So?"), {"type": "tool_result", "tool_use_id": "t3"}]},
    ]
    turns = chat(messages=messages, tools=[TOOL]).messages
    assert [(turn.role, turn.text, len(turn.calls), turn.tool_call_id) for turn in turns] == [
        ("user", "hello", 0, None),
        ("assistant", "Let me see.", 2, None),
        ("tool", "8\n9", 0, "t2"),
        ("tool", "7", 0, "t1"),
        ("user", "Go on.", 0, None),
        ("assistant", "", 1, None),
        ("user", "So?", 0, None),
        ("tool", "", 0, "t3"),
    ]
    assert turns[1].calls[0] == ("t1", "f", '{"a": 1}')
    assert turns[5].calls[0][2] == '{"b": "ä\\n"}'


def test_the_model_reads_that_a_call_failed() -> None:
    messages = [USER, {"role": "assistant", "content": [TOOL_USE]}]
    failed = {**RESULT, "is_error": True, "content": [text("no such file")]}
    assert conversation(messages=[*messages, {"role": "user", "content": [failed]}])[-1] == (
        "tool",
        "Error: no such file",
    )


def test_a_last_message_of_the_assistant_is_continued() -> None:
    request = chat(messages=[USER, {"role": "assistant", "content": [text("Sure: ")]}])
    assert (request.continue_final_message, request.begun_message.text) == (True, "Sure: ")
    request = chat(messages=[USER, {"role": "assistant", "content": ""}])
    assert (request.continue_final_message, len(request.messages)) == (False, 1)
    ended = {"messages": [USER, {"role": "assistant", "content": "Sure: "}], "tools": [TOOL]}
    assert chat(**ended, tool_choice={"type": "none"}).continue_final_message


@pytest.mark.parametrize(
    ("choice", "names", "required", "several"),
    [
        (None, ["f", "g"], False, True),
        ({"type": "auto"}, ["f", "g"], False, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ["f", "g"], False, False),
        ({"type": "any"}, ["f", "g"], True, True),
        ({"type": "any", "disable_parallel_tool_use": True}, ["f", "g"], True, False),
        ({"type": "tool", "name": "g"}, ["g"], True, False),
    ],
)
def test_tools_are_offered_as_in_a_chat(choice: Any, names: list[str], required: bool, several: bool) -> None:
    bare = {"type": "custom", "name": "g", "input_schema": SCHEMA, "eager_input_streaming": True, "strict": True}
    offer = chat(tools=[TOOL | CACHED, bare], tool_choice=choice).offer
    assert offer is not None
    assert [function.name for function in offer.allowed] == names
    assert (offer.required, offer.several) == (required, several)
    described, undescribed = offer.functions
    assert (described.description, described.parameters, described.strict) == ("d", SCHEMA, None)
    assert (undescribed.description, undescribed.strict) == (None, True)


def test_tools_that_may_not_be_called_are_no_offer() -> None:
    assert chat(tools=[TOOL], tool_choice={"type": "none"}).offer is None
    assert chat(tools=[], tool_choice={"type": "auto"}).offer is None


def test_options_reach_the_chat_request_by_their_names_there() -> None:
    request = chat(
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        seed=3,
        stream=True,
        stop_sequences=["a", "\n"],
        metadata={"user_id": "u", "team": "t"},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    )
    assert (request.max_completion_tokens, request.seed, request.stream, request.end_user) == (5, 3, True, "u")
    assert (request.options["temperature"], request.options["top_p"], request.options["top_k"]) == (0.5, 0.9, 0)
    assert request.stop_strings == ("a", "\n")
    assert request.constraint is not None
    assert json.loads(request.constraint.text) == SCHEMA
    assert chat().options["temperature"] == 1.0


@pytest.mark.parametrize(
    ("asked", "effort", "wants", "variable"),
    [
        ({}, None, True, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, None, True, True),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "high", True, True),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "none", False, False),
    ],
)
def test_thinking_is_asked_of_the_template(
    asked: dict[str, Any], effort: str | None, wants: bool, variable: bool | None
) -> None:
    request = chat(**asked)
    assert (request.reasoning_effort, request.wants_thinking) == (effort, wants)
    assert request.template_variables(may_think=True).get("enable_thinking") is variable


@pytest.mark.parametrize(
    "harmless",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"service_tier": "auto", "speed": "fast", "inference_geo": "eu", "diagnostics": {}},
        {"context_management": {"edits": []}, "cache_control": {"type": "ephemeral"}},
        {"metadata": {"user_id": None}, "tool_choice": None, "system": None, "output_config": {"effort": "high"}},
    ],
    ids=json.dumps,
)
def test_what_changes_nothing_is_accepted(harmless: dict[str, Any]) -> None:
    assert (chat(**harmless).constraint, chat(**harmless).offer) == (None, None)


ANSWER = {"role": "assistant", "content": "hi"}
CALLED = {"role": "assistant", "content": [TOOL_USE]}


def of_user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [USER, CALLED, {"role": "user", "content": list(blocks)}]}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": None}, "max_tokens", "required"),
    ({"max_tokens": 0}, "max_tokens", "1"),
    ({"max_tokens": MAX_TOKENS + 1}, "max_tokens", str(MAX_TOKENS)),
    ({"messages": None}, "messages", "required"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "required"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content", "a string or a list of blocks"),
    ({"messages": [{"role": "tool", "content": "7"}]}, "messages.0.role", "not 'tool'"),
    (of_user("hello"), "messages.2.content.0", "expected a block"),
    (of_user({"text": "hello"}), "messages.2.content.0.type", "required"),
    (of_user({"type": "text"}), "messages.2.content.0.text", "required"),
    (
        of_user(RESULT, {"type": "image", "source": {}}),
        "messages.2.content.1",
        "'image' are not supported here: the models",
    ),
    (of_user({"type": "document"}), "messages.2.content.0", "'document' are not supported here: the models of this"),
    (of_user({"type": "search_result"}), "messages.2.content.0", "supported are text, tool_use, tool_result, thinking"),
    (
        of_user({**RESULT, "content": [text("x"), {"type": "image", "source": {}}]}),
        "messages.2.content.0.content.1",
        "'image' are not supported here",
    ),
    (
        of_user({**RESULT, "tool_use_id": "t2"}),
        "messages.2.content.0.tool_use_id",
        "no earlier tool_use has the id 't2'",
    ),
    (of_user({**RESULT, "is_error": "yes"}), "messages.2.content.0.is_error", "boolean"),
    (of_user(TOOL_USE), "messages.2.content.0", "the role user has no blocks of type tool_use"),
    ({"messages": [USER, {"role": "assistant", "content": [RESULT]}]}, "messages.1.content.0", "of type tool_result"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}, "messages.0.content.0", "of type thinking"),
    (
        {"messages": [USER, {"role": "assistant", "content": [{**TOOL_USE, "input": "x"}]}]},
        "messages.1.content.0.input",
        "an object",
    ),
    (
        {"messages": [USER, {"role": "assistant", "content": [{**TOOL_USE, "name": "a b"}]}]},
        "messages.1.content.0.name",
        "pattern",
    ),
    ({"messages": [USER, CALLED]}, "messages", "the calls at the end have no results"),
    ({"messages": [USER, ANSWER], "tools": [TOOL]}, "messages", "cannot be continued where tools may be called"),
    ({"messages": [ANSWER]}, "messages", "expected a message of the user before"),
    ({"messages": [{"role": "assistant", "content": []}]}, "messages", "expected a message with text"),
    ({"messages": [{"role": "user", "content": [text("")] * (MAX_BLOCKS // 2 + 1)}] * 2}, "messages", "blocks exceed"),
    ({"messages": [USER] * MAX_BLOCKS, "system": "s"}, "messages", "at most 4096"),
    ({"system": [{"type": "image"}]}, "system.0", "'image' are not supported here"),
    ({"system": 7}, "system", "a string or a list of blocks"),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema", "required"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0.name", "pattern"),
    ({"tools": [TOOL, TOOL]}, "tools", "two functions have the name 'f'"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0", "'web_search_20250305' are not supported"),
    ({"tools": [TOOL] * 129}, "tools", "at most 128"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "no tools to choose"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name", "required"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice", "has the name 'g'"),
    ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type", "not 'required'"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "an object"),
    ({"stop_sequences": "x"}, "stop_sequences", "array"),
    ({"stop_sequences": [""]}, "stop_sequences.0", "at least 1"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences", "at most 16"),
    ({"temperature": -1}, "temperature", "0"),
    ({"top_p": -0.1}, "top_p", "0"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"metadata": {"user_id": 7}}, "metadata.user_id", "string"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type", "not 'text'"),
    ({"mcp_servers": []}, "mcp_servers", "unsupported parameter"),
    ({"max_completion_tokens": 7}, "max_completion_tokens", "unsupported parameter"),
]


@pytest.mark.parametrize(("request_fields", "param", "reason"), REFUSED, ids=lambda value: json.dumps(value)[:70])
def test_what_is_not_served_is_refused_with_its_field(request_fields: Any, param: str, reason: str) -> None:
    with pytest.raises(ApiError) as raised:
        chat(**request_fields)
    problem = raised.value
    assert (problem.status, problem.param) == (400, param)
    assert reason in problem.message
    body = json.loads(problem.body("/v1/messages"))
    assert body == {"type": "error", "error": {"type": "invalid_request_error", "message": problem.message}}
    assert param in problem.message


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_an_error_has_the_form_of_the_api_of_its_path(status: int, kind: str) -> None:
    problem = ApiError(status, "failed", "it broke")
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/other"):
        assert json.loads(problem.body(path)) == {"type": "error", "error": {"type": kind, "message": "it broke"}}
    for path in ("", "/v1/chat/completions", "/v1/messages_of"):
        assert json.loads(problem.body(path))["error"]["code"] == "failed"


def test_a_prompt_that_is_too_long_has_the_words_that_clients_search_for() -> None:
    assert prompt_too_long(8, 9).anthropic()["error"]["message"].startswith("prompt is too long: This model's maximum")


def test_a_count_is_of_the_prompt_of_the_same_request() -> None:
    body: dict[str, Any] = {
        "messages": [USER, ANSWER],
        "system": [text("Be short.")],
        "tools": [TOOL],
        "tool_choice": {"type": "none"},
        "thinking": {"type": "disabled"},
    }
    counted = parse_body(json.dumps(body).encode(), CountTokensRequest).as_chat()
    generated = chat(**body)
    assert counted.messages == generated.messages
    assert (counted.tools, counted.offer, counted.begun_message.text) == (generated.tools, None, "hi")
    with pytest.raises(ApiError, match="unsupported parameter: 'max_tokens'"):
        parse_body(json.dumps(body | {"max_tokens": 8}).encode(), CountTokensRequest)
