"""Calls in an answer: found in its text however it is cut into pieces, and sent as OpenAI's clients expect them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from neuronpipe.protocol.messages.client import Token
from neuronpipe.services.gateway.answers.answer_format import AnswerFormat, Call
from neuronpipe.services.gateway.answers.answer_format import parse_answer as parsed
from neuronpipe.services.gateway.answers.call_parser import CallParser
from neuronpipe.services.gateway.answers.parts import Arguments, CallStart, Content, Part
from neuronpipe.services.gateway.openai.chat_encoding import ChatEncoder, FunctionCallEncoder
from neuronpipe.services.gateway.openai.echo import empty_completion
from neuronpipe.services.gateway.templates.call_format import DEFAULT, ONE_CALL, CallFormat

from tests.unit.test_call_formats import BARE_FORM, ID, LIST_FORM

ROME, NOW = '{"of": "a \\"}\\\\", "x": [{}]}', "{}"
CALLS = [Call("look_up", ROME), Call("now", NOW)]
WRITTEN = DEFAULT.written([*CALLS])
TOKEN = Token(request="r", index=0, token=7, text="", ms=1.0)
FINISHED = dataclasses.replace(empty_completion(prompt_tokens=1), reason="end", tokens=2)


def parse_answer(text: str, calls: CallFormat) -> tuple[str, list[Call], bool]:
    return parsed(text, AnswerFormat(calls=calls))[1:]


def joined(parts: list[Part]) -> tuple[str, list[Call]]:
    said, calls = "", list[Call]()
    for part in parts:
        if isinstance(part, Content):
            assert not calls
            said += part.text
        elif isinstance(part, CallStart):
            assert part.call == len(calls)
            calls.append(Call(part.name, ""))
        else:
            assert part.call == len(calls) - 1
            assert part.text
            calls[-1] = Call(calls[-1].name, calls[-1].arguments + part.text)
    return said, calls


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize("before", ["", "Let me look.", "  Is 1 < 2?\n", "<tool", "Ünï <tool_ "])
def test_text_and_calls_are_told_apart_however_the_answer_is_cut(size: int, before: str) -> None:
    text = f"{before}\n{WRITTEN}"
    reader = CallParser(DEFAULT)
    parts = [part for at in range(0, len(text), size) for part in reader.push(text[at : at + size])]
    assert joined([*parts, *reader.finish()]) == (before.rstrip(), CALLS)
    assert reader.complete


NUMBERED = CallFormat(
    before="<calls>functions.", between=":\0<args>", next="<end>functions.", after="<end></calls>", marker="<calls>"
)
ONE_BY_ONE = CallFormat(
    before="<call>",
    between="",
    next="</call><call>",
    after="</call>",
    marker="<call>",
    parameter_before="<key>",
    parameter_between="</key><value>",
    parameter_after="</value>",
)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_number_after_a_name_is_no_part_of_it(size: int) -> None:
    text = f"<calls>functions.look_up:3<args>{ROME}<end>functions.mcp:now:4<args>{NOW}<end></calls>"
    reader = CallParser(NUMBERED)
    parts = [part for at in range(0, len(text), size) for part in reader.push(text[at : at + size])]
    assert joined(parts) == ("", [Call("look_up", ROME), Call("mcp:now", NOW)])


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_arguments_may_follow_a_name_at_once(size: int) -> None:
    text = "<call>look_up<key>of</key><value>a</value></call><call>now</call>"
    reader = CallParser(ONE_BY_ONE)
    parts = [part for at in range(0, len(text), size) for part in reader.push(text[at : at + size])]
    assert joined(parts) == ("", [Call("look_up", '{"of": "a"}'), Call("now", "{}")])


@pytest.mark.parametrize("endless", [" ", "\n", "x"])
@pytest.mark.parametrize(
    ("form", "begun"),
    [
        (DEFAULT, "<tool_call>"),
        (DEFAULT, '<tool_call>{"name": "'),
        (DEFAULT, '<tool_call>{"name": "f"'),
        (DEFAULT, '<tool_call>{"name": "f", "arguments": {}'),
        (ONE_BY_ONE, "<call>f"),
        (ONE_BY_ONE, "<call>f<"),
        (ONE_BY_ONE, "<call>f<key>"),
        (ONE_BY_ONE, "<call>f<key>k</key><value>v</value>"),
        (NUMBERED, "<calls>functions.f"),
    ],
)
def test_a_completion_that_repeats_one_character_is_not_held_back(form: CallFormat, begun: str, endless: str) -> None:
    reader = CallParser(form)
    parts, held = list(reader.push(begun)), 0
    for _ in range(300):
        parts += reader.push(endless * 100)
        held = max(held, len(reader._buffer))
    assert held <= 2048
    assert sum(len(part.text) for part in parts if isinstance(part, Content)) in (0, len(begun) + 30000)


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("text", ["", "Hello", " a\n\n b <tool_cal", "<<tool_call", "{} \n"])
def test_an_answer_without_calls_is_its_text_to_the_letter(size: int, text: str) -> None:
    for form in (DEFAULT, LIST_FORM, BARE_FORM):
        reader = CallParser(form)
        parts = [part for at in range(0, len(text), size) for part in reader.push(text[at : at + size])]
        assert joined([*parts, *reader.finish()]) == (text, [])


def test_text_is_shown_as_soon_as_it_cannot_be_a_call() -> None:
    reader = CallParser(DEFAULT)
    pieces = ["Is ", "1 ", "<", " 2", "?", " <tool", "_cal", "led>", "!"]
    assert ["".join(part.text for part in reader.push(piece) if isinstance(part, Content)) for piece in pieces] == [
        "Is",
        " 1",
        "",
        " < 2",
        "?",
        "",
        "",
        " <tool_called>",
        "!",
    ]


def test_a_call_is_shown_as_it_comes_its_name_first() -> None:
    reader = CallParser(DEFAULT)
    pieces = ["<tool_call>", '\n{"name": "no', 'w", "argu', 'ments": ', '{"a"', ": 1", "}", "}\n</tool_call>"]
    assert [list(reader.push(piece)) for piece in pieces] == [
        [],
        [],
        [CallStart(0, "now")],
        [],
        [Arguments(0, '{"a"')],
        [Arguments(0, ": 1")],
        [Arguments(0, "}")],
        [],
    ]


def test_ids_that_the_model_writes_are_passed_over() -> None:
    text = LIST_FORM.written([*CALLS]).replace(ID, "a1Ba1Ba1B")
    assert parse_answer(text, LIST_FORM) == ("", CALLS, True)
    assert parse_answer(text.replace("] [", "]["), LIST_FORM) == ("", CALLS, True)  # a space that the tokenizer dropped


def test_without_a_marker_a_call_is_the_whole_answer() -> None:
    assert parse_answer(BARE_FORM.written(CALLS[:1]), BARE_FORM) == ("", CALLS[:1], True)
    assert parse_answer('{"names": 1}', BARE_FORM) == ('{"names": 1}', [], False)
    assert parse_answer(f"So: {BARE_FORM.written(CALLS[:1])}", BARE_FORM)[1] == []


@pytest.mark.parametrize("form", [DEFAULT, ONE_CALL])
def test_an_answer_that_is_cut_off_has_what_there_is(form: CallFormat) -> None:
    text = f"Well.\n{form.written(CALLS[:1])}"
    for end in range(len(text)):
        said, calls, complete = parse_answer(text[:end], form)
        assert complete == (end >= text.index("]}") + 2)
        if calls:
            assert (said, calls[0].name) == ("Well.", "look_up")
            assert ROME.startswith(calls[0].arguments)
        else:
            assert said == text[:end]


# ---- as OpenAI's API has it ----------------------------------------------------------------------------------
def form_of(
    calls: CallFormat = DEFAULT,
    *,
    text: bool = True,
    with_logprobs: bool = False,
    kind: type[ChatEncoder] = ChatEncoder,
) -> ChatEncoder:
    return kind(
        "m",
        "f",
        with_usage=False,
        with_logprobs=with_logprobs,
        end_tokens=[0],
        answer=AnswerFormat(calls=calls, text=text),
    )


def choice(text: str, reason: Any = "end", calls: CallFormat = DEFAULT) -> dict[str, Any]:
    finished = dataclasses.replace(FINISHED, text=text, reason=reason)
    (made,) = json.loads(form_of(calls).whole([(0, finished)], {}))["choices"]
    return dict(made)


def deltas(form: ChatEncoder, pieces: list[str], **last: Any) -> list[dict[str, Any]]:
    events = form.first(0)
    for piece in pieces:
        events += form.piece(0, dataclasses.replace(TOKEN, text=piece, logprob=-1.0, piece=piece.encode()))
    events += form.last(0, dataclasses.replace(FINISHED, text="".join(pieces), **last))
    return [json.loads(event.removeprefix("data: "))["choices"][0] for event in events.decode().split("\n\n") if event]


def test_a_whole_answer_has_its_calls_beside_its_text() -> None:
    made = choice(f"Well.\n{WRITTEN}")
    message = made["message"]
    assert (made["finish_reason"], message["content"]) == ("tool_calls", "Well.")
    assert [one["function"] for one in message["tool_calls"]] == [call._asdict() for call in CALLS]
    assert [one["type"] for one in message["tool_calls"]] == ["function"] * 2
    ids = [one["id"] for one in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(one.startswith("call_") for one in ids)


def test_an_answer_that_only_calls_has_no_content_and_one_that_calls_nothing_no_calls() -> None:
    assert choice(WRITTEN)["message"]["content"] is None
    made = choice("Hello")
    assert (made["finish_reason"], made["message"]) == (
        "stop",
        {"role": "assistant", "content": "Hello", "refusal": None},
    )
    assert choice("")["message"]["content"] == ""


def test_calls_that_are_cut_off_say_so() -> None:
    cut = WRITTEN[: WRITTEN.index("]}")]
    assert choice(cut, "length")["finish_reason"] == "length"
    assert choice(cut, "stop")["finish_reason"] == "stop"
    assert choice(WRITTEN, "length")["finish_reason"] == "length"


def test_templates_with_ids_of_their_own_get_such_ids() -> None:
    text = LIST_FORM.written([*CALLS]).replace(ID, "a1Ba1Ba1B")
    for one in choice(text, calls=LIST_FORM)["message"]["tool_calls"]:
        assert len(one["id"]) == 9
        assert one["id"].isalnum()


def test_a_stream_says_who_speaks_then_what_then_whom_it_calls() -> None:
    pieces = [f"Well.\n{WRITTEN}"[at : at + 9] for at in range(0, len(WRITTEN) + 6, 9)]
    made = deltas(form_of(), pieces)
    assert made[0]["delta"] == {"role": "assistant", "content": None}
    assert made[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"}
    said, calls = "", dict[int, dict[str, Any]]()
    for one in made[1:-1]:
        assert one["finish_reason"] is None
        said += one["delta"].get("content", "")
        for call in one["delta"].get("tool_calls", []):
            if "id" in call:
                assert call["function"] == {"name": CALLS[call["index"]].name, "arguments": ""}
                calls[call["index"]] = call
            else:
                assert set(call) == {"index", "function"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    assert said == "Well."
    assert [call["function"] for call in calls.values()] == [call._asdict() for call in CALLS]


def test_a_stream_of_text_is_sent_to_the_letter() -> None:
    made = deltas(form_of(), ["Hel", "lo <", "tool "], reason="length")
    assert "".join(one["delta"].get("content") or "" for one in made) == "Hello <tool "
    assert made[-1]["finish_reason"] == "length"


def test_every_token_of_a_stream_is_rated_whatever_it_belongs_to() -> None:
    pieces = [WRITTEN[at : at + 9] for at in range(0, len(WRITTEN), 9)]
    made = deltas(form_of(with_logprobs=True), pieces)
    rated = [entry["token"] for one in made if one["logprobs"] for entry in one["logprobs"]["content"]]
    assert rated == pieces


def test_a_function_of_the_older_form_is_called_without_an_id_whole_and_streamed() -> None:
    written = DEFAULT.written([CALLS[0]])
    body = json.loads(
        form_of(kind=FunctionCallEncoder).whole([(0, dataclasses.replace(FINISHED, text=f"Well.\n{written}"))], {})
    )
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["content"] == "Well."
    assert choice["message"]["function_call"] == CALLS[0]._asdict()
    assert "tool_calls" not in choice["message"]
    pieces = [written[at : at + 9] for at in range(0, len(written), 9)]
    streamed = deltas(form_of(kind=FunctionCallEncoder), pieces)
    calls = [one["delta"]["function_call"] for one in streamed if "function_call" in one["delta"]]
    assert calls[0] == {"name": "look_up", "arguments": ""}
    assert "".join(call["arguments"] for call in calls) == ROME
    assert all(set(call) == {"arguments"} for call in calls[1:])
    assert streamed[-1]["finish_reason"] == "function_call"
