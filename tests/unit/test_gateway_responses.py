"""The Responses API: what a request says as a chat request, and answers that the openai client reads."""

from __future__ import annotations

import json
from typing import Any

import openai.types.responses as known
import pytest
from neuronpipe.protocol.messages.client import Likely, Token
from neuronpipe.services.gateway.bodies import parse_body
from neuronpipe.services.gateway.problems import Problem
from neuronpipe.services.gateway.response_form import ResponseForm
from neuronpipe.services.gateway.responses import NOT_STORED, ResponsesRequest
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
    assert (chat.max_completion_tokens, chat.seed, chat.rated, chat.stream, chat.who) == (5, 3, 2, True, "u")
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
    assert (chat.rated, chat.constraint) == (None, None)


@pytest.mark.parametrize(
    ("asked", "param", "reason"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", NOT_STORED),
        ({"conversation": "conv_1"}, "conversation", NOT_STORED),
        ({"conversation": {"id": "conv_1"}}, "conversation", NOT_STORED),
        ({"background": True}, "background", "nowhere to fetch"),
        ({"prompt": {"id": "p"}}, "prompt", "not stored"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools", "call no tools here"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.item_reference", NOT_STORED),
        ({"input": [{"type": "function_call_output"}]}, "input.0.function_call_output", "call no tools here"),
        ({"input": [{"type": "computer_call"}]}, "input.0", "an item of type message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None, "input_image"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "reasoning"}], "instructions": "i"}, "input", "a message in it"),
        ({"input": [{"role": "user", "content": "x"}] * 4096, "instructions": "i"}, "messages", "at most 4096"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1"),
    ],
    ids=lambda asked: json.dumps(asked)[:80],
)
def test_what_is_not_served_is_refused_with_its_reason(asked: dict[str, Any], param: str | None, reason: str) -> None:
    with pytest.raises(Problem) as raised:
        parsed(**asked).as_chat()
    problem = raised.value
    assert problem.status == 400
    assert param is None or problem.param == param
    assert reason in problem.message


def form(*, rates: bool = False, **body: Any) -> ResponseForm:
    return ResponseForm(parsed(**body).echoed(), "model", "np", counts=False, rates=rates, end_tokens={END})


@pytest.mark.parametrize(("reason", "status"), [("end", "completed"), ("stop", "completed"), ("length", "incomplete")])
def test_a_response_is_what_the_client_knows(reason: Any, status: str) -> None:
    import dataclasses

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
    one = form(rates=True, top_logprobs=1)
    end = Token(request="r", index=1, token=END, text="", ms=1.0, logprob=-1.0, piece=b"<end>")
    stream = one.first(0) + one.piece(0, TOKEN) + one.piece(0, end) + one.last(0, DONE) + one.counted(dict(USAGE))
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


def test_a_stream_that_fails_ends_with_an_event_that_says_why() -> None:
    one = form()
    (*_, error) = events(one.first(0) + one.failed(Problem(500, "failed", "it broke")))
    assert (error.type, error.code, error.message) == ("error", "failed", "it broke")
