"""Reasoning in an answer: found however the text is cut into pieces, between tags and in channels."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from neuronpipe.services.gateway.answers.answer_format import AnswerFormat, parse_answer
from neuronpipe.services.gateway.answers.call_parser import MAX_VALUE_CHARACTERS
from neuronpipe.services.gateway.answers.harmony_parser import MAX_HEADER_CHARACTERS
from neuronpipe.services.gateway.answers.parts import MAX_BLANKS, Content, Part, Reasoning
from neuronpipe.services.gateway.answers.thinking_format import HARMONY, THINKING_FORMATS, Begin, thinking_format
from neuronpipe.services.gateway.templates.call_format import DEFAULT

from tests.unit.test_call_formats import HARMONY as HARMONY_TEMPLATE
from tests.unit.test_call_formats import LINES, THINKING, found

(TAGS,) = (form for form in THINKING_FORMATS if form.open_tag == "<think>")
SIZES = [1, 2, 3, 7, 1000]
ANALYSIS = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
PREFACE = "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>It rains."
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Os{o"}'
EARLY = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Os{o"}'
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tags": {"$ref": "#/$defs/tags"},
    },
    "$defs": {"tags": {"type": "array"}},
}


def parsed(text: str, form: AnswerFormat, size: int = 1000) -> tuple[str, str, list[tuple[str, str]], bool]:
    """Return reasoning, text and calls of an answer that comes in pieces, which must be those of the whole."""
    parser = form.parser()
    parts: list[Part] = []
    for at in range(0, len(text), size):
        parts += parser.push(text[at : at + size])
    parts += parser.finish()
    reasoning, content, calls = "", "", list[list[str]]()
    for part in parts:
        match part:
            case Reasoning():
                reasoning += part.text
            case Content():
                content += part.text
            case _:
                calls += [[part.name, ""]] if hasattr(part, "name") else []
                calls[part.call][1] += getattr(part, "text", "")
    whole = parse_answer(text, form)
    made = [(name, arguments) for name, arguments in calls]
    assert (whole.reasoning, whole.text, [(*call,) for call in whole.calls]) == (reasoning, content, made)
    return reasoning, content, made, bool(calls) and parser.complete


def tags(begins: Begin = "start", *, calls: bool = False) -> AnswerFormat:
    return AnswerFormat(thinking=TAGS, begins=begins, calls=DEFAULT if calls else None)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("begins", "text", "reasoning", "content"),
    [
        ("start", "<think>\nI see.\n\nSo.\n</think>\n\nHello\n", "I see.\n\nSo.", "Hello\n"),
        ("start", "<think>\n\n</think>\n\nHello", "", "Hello"),
        ("start", "\n<think>a < b</think>c", "a < b", "c"),
        ("start", "Hello <think> there", "", "Hello <think> there"),
        ("start", " Hello", "", " Hello"),
        ("start", "<thin", "", "<thin"),
        ("start", "<think>I never end </thin", "I never end </thin", ""),
        ("start", "</think>\nHello", "", "Hello"),
        ("reasoning", "I see.\n</think>\n\nHello", "I see.", "Hello"),
        ("reasoning", "<think>\nI see.</think>Hello", "I see.", "Hello"),
        ("reasoning", " I never end", "I never end", ""),
        ("reasoning", "", "", ""),
        ("answer", "<think>x</think>Hello", "x", "Hello"),
        ("content", "<think>x</think>", "", "<think>x</think>"),
        ("start", "<think>x</think>a</think>b", "x", "a</think>b"),
    ],
)
def test_reasoning_is_between_tags(begins: Begin, text: str, reasoning: str, content: str, size: int) -> None:
    assert parsed(text, tags(begins), size)[:2] == (reasoning, content)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("text", ["a", "to", "assistant", "assistants " + "are here " * 200])
def test_an_answer_that_keeps_to_no_format_is_text(text: str, size: int) -> None:
    assert parsed(text, AnswerFormat(thinking=HARMONY, begins="start", calls=HARMONY.calls), size)[:2] == ("", text)


@pytest.mark.parametrize("size", SIZES)
def test_calls_follow_reasoning_and_what_reasoning_says_of_calls_is_no_call(size: int) -> None:
    call = DEFAULT.written([("f", '{"a": 1}')])
    text = f"<think>\nI could say {call}\n</think>\n\nWell.\n{call}"
    reasoning, content, calls, complete = parsed(text, tags(calls=True), size)
    assert (reasoning, content, calls, complete) == (f"I could say {call}", "Well.", [("f", '{"a": 1}')], True)


FORMS = [
    AnswerFormat(thinking=thinking, calls=calls, begins=begins, schemas={"f": SCHEMA})
    for thinking in (None, *THINKING_FORMATS)
    for calls in ((None, HARMONY.calls) if thinking is HARMONY else (None, DEFAULT, found(LINES)))
    for begins in (("start", "reasoning", "answer", "content") if thinking is not None else ("start",))
]
WORDS = ["x", "f", '"', "{", "}", "<", "\n", " " * 70, "assistant", "final", "analysis", "to=functions.f"]


@given(st.data())
def test_pieces_have_the_parts_of_the_whole(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(FORMS))
    marks = () if form.thinking is None else (form.thinking.open, form.thinking.close, *form.thinking.tokens)
    if form.calls is not None:
        call = form.calls.before, form.calls.between, form.calls.next, form.calls.after
        parameter = form.calls.parameter_before, form.calls.parameter_between, form.calls.parameter_after
        marks += (*call, *parameter, form.calls.written([("f", "")]))
    text = "".join(data.draw(st.lists(st.sampled_from([*WORDS, *filter(None, marks)]), max_size=14)))
    assert parsed(text, form, data.draw(st.sampled_from(SIZES))) == parsed(text, form)


def test_an_answer_that_is_full_of_tags_is_parsed_in_linear_time() -> None:
    began_s = time.process_time()
    assert (
        parse_answer("x<|constrain|>" * 20_000, AnswerFormat(thinking=HARMONY, begins="content")).text == "x" * 20_000
    )
    assert time.process_time() - began_s < 2, "each tag was searched in the whole answer"


def test_white_space_before_a_call_is_held_back_within_a_bound() -> None:
    parser = tags("content", calls=True).parser()
    shown = [part.text for _ in range(1000) for part in parser.push("\n") if isinstance(part, Content)]
    assert len("".join(shown)) == 1000 - MAX_BLANKS


def test_text_is_shown_as_it_comes_and_little_is_held_back() -> None:
    parser = tags().parser()
    pieces = ["<think>", "\n", "Let", " me", "\n", "</", "thi", "nk>", "\n\n", "Hel", "lo"]
    assert [list(parser.push(piece)) for piece in pieces] == [
        *([[]] * 2),
        [Reasoning("Let")],
        [Reasoning(" me")],
        *([[]] * 5),
        [Content("Hel")],
        [Content("lo")],
    ]
    for text in ("</think" * 1000, "\n" * 1000, "<" * 1000):
        parser = tags("reasoning").parser()
        shown = "".join(part.text for piece in f"x{text}" for part in parser.push(piece))  # type: ignore[union-attr]
        assert len(shown) >= len(text) - MAX_BLANKS


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ANALYSIS + FINAL, ("Let me see.", "It rains.", [])),
        (ANALYSIS + FINAL + "<|return|>", ("Let me see.", "It rains.", [])),
        (FINAL, ("", "It rains.", [])),
        (ANALYSIS + CALL, ("Let me see.", "", [("weather", '{"city": "Os{o"}')])),
        (ANALYSIS + CALL + "<|call|>", ("Let me see.", "", [("weather", '{"city": "Os{o"}')])),
        (ANALYSIS + EARLY, ("Let me see.", "", [("weather", '{"city": "Os{o"}')])),
        (EARLY, ("", "", [("weather", '{"city": "Os{o"}')])),
        (ANALYSIS + PREFACE + CALL, ("Let me see.", "I look it up.", [("weather", '{"city": "Os{o"}')])),
        (ANALYSIS + ANALYSIS + PREFACE + FINAL, ("Let me see.\n\nLet me see.", "I look it up.\n\nIt rains.", [])),
        (ANALYSIS.replace("analysis", "analysis to=python code") + FINAL, ("Let me see.", "It rains.", [])),
        ("<|channel|>analysis<|message|>cut o", ("cut o", "", [])),
        ("<|channel|>anal", ("", "", [])),
        ("A model without channels <|", ("", "A model without channels <|", [])),
        ("", ("", "", [])),
    ],
)
def test_channels_are_told_apart(text: str, expected: tuple[str, str, list[tuple[str, str]]], size: int) -> None:
    form = AnswerFormat(thinking=HARMONY, calls=HARMONY.calls)
    reasoning, content, calls, complete = parsed(text, form, size)
    assert (reasoning, content, calls) == expected
    assert complete == bool(calls)


def test_channels_never_reach_a_reader_whatever_comes() -> None:
    pieces = (*HARMONY.tokens, "final", "analysis", "assistant", " to=functions.f", "{", "x", "commentary")
    for begins in ("start", "reasoning", "content"):
        for chosen in itertools.product(pieces, repeat=3):
            answer = parse_answer("".join(chosen), AnswerFormat(thinking=HARMONY, begins=begins, calls=HARMONY.calls))
            shown = answer.reasoning + answer.text + "".join(call.arguments for call in answer.calls)
            assert not any(token in shown for token in HARMONY.tokens), chosen


def test_a_call_that_was_not_offered_is_reasoning_and_a_header_without_end_is_dropped() -> None:
    assert parsed(ANALYSIS + CALL, AnswerFormat(thinking=HARMONY))[:3] == ('Let me see.\n\n{"city": "Os{o"}', "", [])
    endless = parse_answer(f"<|channel|>{'x' * MAX_HEADER_CHARACTERS}Hello", AnswerFormat(thinking=HARMONY))
    assert "<|" not in endless.text
    assert parsed(CALL[:-1], AnswerFormat(thinking=HARMONY, calls=HARMONY.calls))[3] is False


def parameters(*pairs: tuple[str, str]) -> str:
    lines = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in pairs)
    return f"<tool_call>\n<function=f>\n{lines}</function>\n</tool_call>"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("city", "Oslo", "Oslo"),
        ("city", "7", "7"),
        ("city", 'two\n"lines" </param\n', 'two\n"lines" </param\n'),
        ("city", "", ""),
        ("days", "7", 7),
        ("days", "seven", "seven"),
        ("unit", "null", None),
        ("unit", "7", "7"),
        ("tags", '["a", {"b": 1}]', ["a", {"b": 1}]),
        ("unknown", "True", True),
        ("unknown", "1e999", "1e999"),
        ("unknown", "a b", "a b"),
    ],
)
def test_an_argument_has_the_type_of_its_schema(name: str, value: str, expected: object, size: int) -> None:
    form = AnswerFormat(calls=found(LINES), schemas={"f": SCHEMA})
    text = f"Well.\n{parameters(('city', 'Rome'), (name, value))}\n{parameters()}"
    reasoning, content, (first, second), complete = parsed(text, form, size)
    if value == "1e999":  # a number that JSON has and Python's floats do not
        assert first == ("f", '{"city": "Rome", "unknown": 1e999}')
    else:
        assert json.loads(first[1])[name] == expected
    assert (reasoning, content, second, complete) == ("", "Well.", ("f", "{}"), True)


@pytest.mark.parametrize(
    "schema",
    [
        7,
        {"properties": 7},
        {"properties": {"a": 7}},
        {"properties": {"a": {"type": 7}}},
        {"properties": {"a": {"type": [[]], "enum": 7, "anyOf": 7}}},
        {"properties": {"a": {"$ref": 7}}},
        {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": 7},
        {"additionalProperties": 7},
    ],
    ids=json.dumps,
)
def test_a_schema_that_is_none_leaves_the_type_to_the_value(schema: object) -> None:
    form = AnswerFormat(calls=found(LINES), schemas={"f": schema})
    assert parsed(parameters(("a", "7"), ("b", "x y")), form)[2] == [("f", '{"a": 7, "b": "x y"}')]


def test_strings_are_shown_as_they_come_and_other_values_are_not_kept_without_bound() -> None:
    form = AnswerFormat(calls=found(LINES), schemas={"f": SCHEMA})
    for name in ("city", "days"):
        parser = form.parser()
        list(parser.push(f"<tool_call>\n<function=f>\n<parameter={name}>\n"))
        size = 10 if name == "city" else MAX_VALUE_CHARACTERS + 1
        shown = "".join(part.text for part in parser.push("x" * size))  # type: ignore[union-attr]
        assert shown.count("x") == size


def test_a_template_tells_how_its_model_thinks() -> None:
    assert thinking_format(HARMONY_TEMPLATE) is HARMONY
    assert thinking_format(THINKING) is TAGS
    assert thinking_format(LINES) is None


@pytest.mark.parametrize(
    ("prompt", "given", "expected"),
    [
        ("<assistant>", {}, ("", "start")),
        ("<assistant><think>\n", {}, ("", "reasoning")),
        ("<assistant><think>\n", {"thinks": False}, ("\n</think>\n\n", "answer")),
        ("<assistant><think>\n", {"content": "Sure"}, ("\n</think>\n\nSure", "content")),
        ("<assistant><think>\n", {"reasoning": "hm", "content": ""}, ("hm", "reasoning")),
        ("<assistant>", {"reasoning": "hm", "content": "Sure"}, ("<think>\nhm\n</think>\n\nSure", "content")),
        ("<assistant>", {"thinks": False}, ("", "answer")),
    ],
)
def test_a_prompt_says_where_the_answer_begins(
    prompt: str, given: dict[str, object], expected: tuple[str, Begin]
) -> None:
    assert TAGS.beginning(prompt, **given) == expected  # type: ignore[arg-type]


def test_a_prompt_with_channels_begins_the_answer_where_nothing_is_thought() -> None:
    prompt = "<|start|>assistant"
    assert HARMONY.beginning(prompt) == ("", "start")
    assert HARMONY.beginning(prompt, thinks=False) == (HARMONY.answer, "content")
    assert HARMONY.beginning(prompt, thinks=False, calls=True) == ("", "answer")
    assert HARMONY.thoughts("answer") == ()
    assert len(HARMONY.thoughts("start")) == 2
