"""The Responses API: what a request says as a chat request, and answers that the openai client reads."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import openai.types.responses as known
import pytest
from neuronpipe.protocol.messages.client import Likely, Token
from neuronpipe.services.gateway.answers.answer_format import AnswerFormat
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.http.request_body import parse_body
from neuronpipe.services.gateway.openai.responses_api import NOT_STORED, ResponsesRequest
from neuronpipe.services.gateway.openai.responses_encoding import ResponsesEncoder
from neuronpipe.services.gateway.templates.call_format import DEFAULT, CallFormat
from pydantic import TypeAdapter

from tests.unit.test_gateway_answers import DONE

USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 1,
    "total_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 2},
}
END = 0
TOKEN = Token(
    request="r",
    index=0,
    token=7,
    text="ab",
    ms=1.0,
    logprob=-0.5,
    piece=b"ab",
    top=(Likely(token=7, piece=b"ab", logprob=-0.5),),
)


TOOL = {
    "type": "function",
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": True,
}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"}
CHOSEN = {"type": "function", "name": "f"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "7"}


def parsed(**body: Any) -> ResponsesRequest:
    return parse_body(json.dumps({"input": "hello"} | body).encode(), ResponsesRequest)


def said(**body: Any) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in parsed(**body).as_chat().messages]


def test_a_text_is_what_the_user_says_after_the_instructions() -> None:
    assert said() == [("user", "hello")]
    assert said(instructions="Be short.") == [("system", "Be short."), ("user", "hello")]


def test_items_are_the_whole_conversation_as_clients_send_it_back() -> None:
    part = {"type": "output_text", "text": "hi", "annotations": [], "logprobs": []}
    items = [
        {"role": "developer", "content": "Be short."},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "hel"}, {"type": "input_text", "text": "lo"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [part]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    assert said(input=items) == [
        ("developer", "Be short."),
        ("user", "hello"),
        ("assistant", "hi"),
        ("assistant", "no"),
    ]


def test_reasoning_belongs_to_the_answer_or_the_call_after_it() -> None:
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    items = [
        {"role": "user", "content": "x"},
        reasoning,
        {"role": "assistant", "content": "Let me see."},
        {**reasoning, "content": [{"type": "reasoning_text", "text": "o"}, {"type": "reasoning_text", "text": "k"}]},
        CALL,
        RESULT,
        reasoning,
        {"role": "user", "content": "y"},
        {"role": "assistant", "content": "z"},
    ]
    messages = parsed(input=items).as_chat().messages
    assert [(one.role, one.text, len(one.calls), one.thought) for one in messages] == [
        ("user", "x", 0, ""),
        ("assistant", "Let me see.", 0, "hm"),
        ("assistant", "", 1, "ok"),
        ("tool", "7", 0, ""),
        ("user", "y", 0, ""),
        ("assistant", "z", 0, ""),
    ]


def test_the_effort_of_reasoning_is_that_of_the_chat_request_and_repeated() -> None:
    request = parsed(reasoning={"effort": "high", "summary": "auto"})
    assert request.as_chat().reasoning_effort == "high"
    assert request.echoed()["reasoning"] == {"effort": "high", "summary": None}


def test_calls_join_the_answer_that_made_them_and_results_follow() -> None:
    items = [
        {"role": "user", "content": "x"},
        {"type": "reasoning", "summary": []},
        {"role": "assistant", "content": "Let me see."},
        CALL,
        {**CALL, "call_id": "c2"},
        RESULT,
        {
            **RESULT,
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "8"}, {"type": "input_text", "text": "9"}],
        },
        {**CALL, "call_id": "c3"},
        {**RESULT, "call_id": "c3"},
    ]
    messages = parsed(input=items).as_chat().messages
    assert [(one.role, one.text, len(one.calls), one.tool_call_id) for one in messages] == [
        ("user", "x", 0, None),
        ("assistant", "Let me see.", 2, None),
        ("tool", "7", 0, "c"),
        ("tool", "89", 0, "c2"),
        ("assistant", "", 1, None),
        ("tool", "7", 0, "c3"),
    ]
    assert messages[1].calls[0] == ("c", "f", "{}")


@pytest.mark.parametrize(
    ("asked", "names", "required", "several"),
    [
        ({}, ["f", "g"], False, True),
        ({"parallel_tool_calls": False}, ["f", "g"], False, False),
        ({"tool_choice": "required"}, ["f", "g"], True, True),
        ({"tool_choice": {"type": "function", "name": "g"}}, ["g"], True, False),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [CHOSEN]}}, ["f"], False, True),
        ({"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [CHOSEN]}}, ["f"], True, True),
    ],
)
def test_tools_are_offered_as_in_a_chat(asked: dict[str, Any], names: list[str], required: bool, several: bool) -> None:
    bare = {"type": "function", "name": "g", "parameters": None, "strict": None, "defer_loading": False}
    request = parsed(tools=[TOOL, bare], **asked)
    offer = request.as_chat().offer
    assert offer is not None
    assert [one.name for one in offer.allowed] == names
    assert (offer.required, offer.several) == (required, several)
    described, unknown = offer.functions
    assert (described.description, described.parameters, described.strict) == ("d", TOOL["parameters"], True)
    assert (unknown.parameters["type"], unknown.strict) == ("object", None)
    body = form(tools=[TOOL, bare], **asked).whole([(0, DONE)], dict(USAGE))
    response = known.Response.model_validate_json(body)
    assert [tool.name for tool in response.tools] == ["f", "g"]  # type: ignore[union-attr]
    assert response.parallel_tool_calls == asked.get("parallel_tool_calls", True)
    assert json.loads(body)["tool_choice"] == asked.get("tool_choice", "auto")


def test_options_reach_the_chat_request_by_their_names_there() -> None:
    schema = {"type": "object", "properties": {}}
    chat = parsed(
        max_output_tokens=5,
        temperature=0.5,
        top_k=-1,
        ignore_eos=True,
        seed=3,
        top_logprobs=2,
        stream=True,
        safety_identifier="u",
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}, "verbosity": "low"},
    ).as_chat()
    assert (chat.max_completion_tokens, chat.seed, chat.logprobs_per_token, chat.stream, chat.end_user) == (
        5,
        3,
        2,
        True,
        "u",
    )
    assert (chat.options["temperature"], chat.options["top_k"], chat.options["ignore_end"]) == (0.5, 0, True)
    assert chat.constraint is not None
    assert json.loads(chat.constraint.text) == schema


@pytest.mark.parametrize(
    "harmless",
    [
        {"store": True},
        {"store": False, "include": ["reasoning.encrypted_content"]},
        {"background": False},
        {"truncation": "auto"},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "max_tool_calls": 3},
        {"reasoning": {"effort": "low"}},
        {"previous_response_id": None, "conversation": None, "prompt": None},
        {"metadata": {"a": "b"}, "service_tier": "auto", "stream_options": {"include_obfuscation": False}},
        {"text": {"format": {"type": "text"}}},
    ],
    ids=json.dumps,
)
def test_what_changes_nothing_is_accepted(harmless: dict[str, Any]) -> None:
    chat = parsed(**harmless).as_chat()
    assert (chat.logprobs_per_token, chat.constraint) == (None, None)


@pytest.mark.parametrize(
    ("asked", "param", "reason"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", NOT_STORED),
        ({"conversation": "conv_1"}, "conversation", NOT_STORED),
        ({"conversation": {"id": "conv_1"}}, "conversation", NOT_STORED),
        ({"background": True}, "background", "stores no responses"),
        ({"prompt": {"id": "p"}}, "prompt", "not stored"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "'web_search' are not supported: OpenAI runs them"),
        ({"tools": [TOOL, {"type": "code_interpreter", "container": {}}]}, "tools.1", "'code_interpreter' are not"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools.0", "'custom' are not supported: their input is free"),
        (
            {"tools": [{"type": "mcp", "server_url": "u"}]},
            "tools.0",
            "'mcp' are not supported: this server does",
        ),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "required"),
        ({"tools": [TOOL, TOOL]}, "tools", "two functions have the name 'f'"),
        ({"tool_choice": "required"}, "tool_choice", "no tools to choose"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "has the name 'g'"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice", "'file_search' are not"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "not 'any'"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", NOT_STORED),
        ({"input": [CALL, {**RESULT, "call_id": "d"}]}, "input.1.call_id", "no earlier function_call"),
        ({"input": [RESULT, CALL]}, "input.0.call_id", "no earlier function_call"),
        ({"input": [CALL, {**RESULT, "output": [{"type": "input_image"}]}]}, None, "input_image"),
        ({"input": [{"type": "computer_call"}]}, "input.0", "items of type 'computer_call' are not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None, "input_image"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "reasoning"}], "instructions": "i"}, "input", "a message in it"),
        ({"input": [{"role": "user", "content": "x"}] * 4096, "instructions": "i"}, "messages", "at most 4096"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1"),
    ],
    ids=lambda asked: json.dumps(asked)[:80],
)
def test_what_is_not_served_is_refused_with_its_reason(asked: dict[str, Any], param: str | None, reason: str) -> None:
    with pytest.raises(ApiError) as raised:
        parsed(**asked).as_chat()
    problem = raised.value
    assert problem.status == 400
    assert param is None or problem.param == param
    assert reason in problem.message


def form(
    *, with_logprobs: bool = False, calls: CallFormat | None = None, text: bool = True, **body: Any
) -> ResponsesEncoder:
    about: dict[str, Any] = {
        "with_usage": False,
        "with_logprobs": with_logprobs,
        "end_tokens": {END},
        "answer": AnswerFormat(calls=calls, text=text),
    }
    return ResponsesEncoder(parsed(**body).echoed(), "model", "np", **about)


@pytest.mark.parametrize(("reason", "status"), [("end", "completed"), ("stop", "completed"), ("length", "incomplete")])
def test_a_response_is_what_the_client_knows(reason: Any, status: str) -> None:
    one = form(instructions="i", metadata={"a": "b"})
    body = one.whole([(0, dataclasses.replace(DONE, reason=reason))], dict(USAGE))
    response = known.Response.model_validate_json(body, strict=False)
    assert (response.status, response.output_text, response.instructions) == (status, DONE.text, "i")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (3, 1, 4)
    assert response.usage.input_tokens_details.cached_tokens == 2
    assert (response.incomplete_details is None) == (status == "completed")
    assert json.loads(body)["store"] is False


def events(stream: bytes) -> list[Any]:
    """As the client parses them; names and numbers checked."""
    adapter: TypeAdapter[Any] = TypeAdapter(known.ResponseStreamEvent)
    made = []
    for number, block in enumerate(stream.decode().split("\n\n")[:-1]):
        name, data = block.split("\n")
        event = adapter.validate_json(data.removeprefix("data: "))
        assert name == f"event: {event.type}"
        assert event.sequence_number == number
        made.append(event)
    return made


def test_a_stream_builds_the_response_up_event_by_event() -> None:
    one = form(with_logprobs=True, top_logprobs=1)
    end = Token(request="r", index=1, token=END, text="", ms=1.0, logprob=-1.0, piece=b"<end>")
    stream = one.first(0) + one.piece(0, TOKEN) + one.piece(0, end) + one.last(0, DONE) + one.usage_chunk(dict(USAGE))
    made = events(stream)
    assert [event.type for event in made] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    delta, last = made[4], made[-1].response
    assert (delta.delta, delta.logprobs[0].token, delta.logprobs[0].logprob) == ("ab", "ab", -0.5)
    assert last.output_text == DONE.text
    assert len(last.output[0].content[0].logprobs) == 1
    assert made[0].response.status == "in_progress"
    assert {last.id} == {event.response.id for event in made if hasattr(event, "response")}
    assert one.done == b""


CALLED = [("f", '{"a": 1}'), ("g", "{}")]
STREAMED = {
    "Let me see.": ["message", "function_call", "function_call"],
    "": ["function_call", "function_call"],
}


def tokens_of(text: str, size: int) -> list[Token]:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return [
        dataclasses.replace(TOKEN, index=index, text=piece, piece=piece.encode(), top=())
        for index, piece in enumerate(pieces)
    ]


def streamed(one: ResponsesEncoder, text: str, size: int, **last: Any) -> list[Any]:
    stream = one.first(0) + b"".join(one.piece(0, token) for token in tokens_of(text, size))
    ended = dataclasses.replace(DONE, **{"text": text, "reason": "end", **last})
    return events(stream + one.last(0, ended) + one.usage_chunk(dict(USAGE)))


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("before", STREAMED)
def test_calls_are_items_after_the_text(before: str, size: int) -> None:
    text = f"{before}\n{DEFAULT.written(CALLED)}"
    made = streamed(form(calls=DEFAULT), text, size)
    response = made[-1].response
    assert response.status == "completed"
    assert [item.type for item in response.output] == STREAMED[before]
    assert response.output_text == before
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.name, call.arguments, call.status) for call in calls] == [(*one, "completed") for one in CALLED]
    assert len({call.call_id for call in calls} | {item.id for item in response.output}) == len(response.output) + 2
    whole = form(calls=DEFAULT)
    for token in tokens_of(text, size):
        whole.keep_logprobs(0, token)
    body = whole.whole([(0, dataclasses.replace(DONE, text=text, reason="end"))], dict(USAGE))
    same = known.Response.model_validate_json(body)
    unnamed = {"id", "call_id"}
    for one, other in zip(response.output, same.output, strict=True):
        assert one.model_dump(exclude=unnamed) == other.model_dump(exclude=unnamed)


def test_each_item_of_a_stream_is_added_grows_and_is_done_before_the_next() -> None:
    made = streamed(form(calls=DEFAULT), f"Let me see.\n{DEFAULT.written(CALLED)}", 4)
    kinds = [event.type.removeprefix("response.") for event in made]
    once = [kind for at, kind in enumerate(kinds) if not at or kind != kinds[at - 1]]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    text = ["added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done", "done"]
    text = [f"output_item.{kind}" if "." not in kind else kind for kind in text]
    assert once == ["created", "in_progress", *text, *call, *call, "completed"]
    response, growing = made[-1].response, dict[int, str]()
    for event in made[2:-1]:
        item = response.output[event.output_index]
        assert getattr(event, "item_id", item.id) == item.id
        if event.type == "response.output_item.added" and item.type == "function_call":
            assert (event.item.call_id, event.item.name) == (item.call_id, item.name)
            assert (event.item.arguments, event.item.status) == ("", "in_progress")
        elif event.type == "response.function_call_arguments.delta":
            growing[event.output_index] = growing.get(event.output_index, "") + event.delta
        elif event.type == "response.function_call_arguments.done":
            assert event.arguments == growing[event.output_index] == item.arguments
        elif event.type == "response.output_item.done":
            assert event.item == item


@pytest.mark.parametrize("left_out", [2, 24])
def test_a_call_that_is_cut_off_is_incomplete(left_out: int) -> None:
    text = DEFAULT.written(CALLED[:1])[: -len("}\n</tool_call>") - left_out]
    made = streamed(form(calls=DEFAULT, text=False), text, 3, reason="length")
    response = made[-1].response
    assert (made[-1].type, response.status) == ("response.incomplete", "incomplete")
    (item,) = response.output
    assert item.status == "incomplete"
    assert item.type == ("function_call" if left_out == 2 else "message")


def test_an_answer_that_could_call_and_says_nothing_is_an_empty_text() -> None:
    made = streamed(form(calls=DEFAULT), "", 1)
    (item,) = made[-1].response.output
    assert (item.type, item.status, item.content[0].text) == ("message", "completed", "")


def test_ratings_are_of_the_text_and_not_of_its_calls() -> None:
    said = "Let me see."
    made = streamed(form(calls=DEFAULT, with_logprobs=True), f"{said}{DEFAULT.written(CALLED)}", 1)
    text = made[-1].response.output[0].content[0]
    assert [one.token for one in text.logprobs] == [*said]
    told = [one.token for event in made if event.type == "response.output_text.delta" for one in event.logprobs]
    assert told == [*said]


def test_a_stream_that_fails_ends_with_an_event_that_says_why() -> None:
    one = form()
    (*_, error) = events(one.first(0) + one.error_chunk(ApiError(500, "failed", "it broke")))
    assert (error.type, error.code, error.message) == ("error", "failed", "it broke")
