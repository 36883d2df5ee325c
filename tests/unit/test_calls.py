"""Answers that call functions: which tokens may follow, with the demo's tokenizer and with one that has a marker."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
from neuronpipe.protocol.messages.request import Calls, Function, Thought
from neuronpipe.services.coordinator.text.grammar import Grammar, GrammarError, Grammars
from neuronpipe.services.coordinator.text.tokenizer import FileTokenizer, TextStream
from neuronpipe.services.gateway.answers.thinking_format import HARMONY
from neuronpipe.services.gateway.templates.call_format import DEFAULT, CallFormat
from neuronpipe.services.gateway.templates.format_probe import probe_format
from tokenizers import AddedToken, Tokenizer

from tests.unit.test_call_formats import BARE_FORM, LINES, LIST_FORM, compiled

pytest.importorskip("llguidance")
PATH = Path(__file__).parents[2] / "plans/demo/package/tokenizer.json"
VOCABULARY, END, MARK = 4097, 0, 4096
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
}
FUNCTIONS = (
    Function(name="weather", arguments=json.dumps(WEATHER)),
    Function(name="weather_now", arguments='{"type": "object", "properties": {}}'),
)


def calls_in(form: CallFormat, most: int) -> Calls:
    texts = {name: getattr(form, name) for name in ("before", "between", "next", "after", "marker")}
    return Calls(functions=FUNCTIONS, most=most, **texts)


BLOCKS, LIST, BARE = calls_in(DEFAULT, most=3), calls_in(LIST_FORM, most=2), calls_in(BARE_FORM, most=1)
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "weather_now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> FileTokenizer:
    library = Tokenizer.from_file(str(PATH))
    library.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    return FileTokenizer(library.to_str().encode())


@pytest.fixture(scope="module")
def grammars(tokenizer: FileTokenizer) -> Grammars:
    return Grammars(tokenizer, VOCABULARY, [END])


def allowed(grammar: Grammar) -> list[int]:
    bits = int.from_bytes(grammar.allowed, "little")
    return [token for token in range(VOCABULARY) if bits >> token & 1]


def follow(grammar: Grammar, tokens: list[int]) -> bool | None:
    """Whether the text is complete with these tokens; None when one may not follow."""
    complete = False
    for token in tokens:
        if complete or token not in allowed(grammar):
            return None
        complete = grammar.take(token)
    return complete


@pytest.fixture
def said(grammars: Grammars, tokenizer: FileTokenizer):  # type: ignore[no-untyped-def]
    """How a text goes with calls: "over" when nothing can follow, "whole" when it may end, "open", or "wrong"."""

    def how(calls: Calls, text: str, grammar: str | None = None) -> str:
        one = grammars.start_calls(calls, grammar)
        complete = follow(one, tokenizer.encode(text))
        return "wrong" if complete is None else "over" if complete else "whole" if END in allowed(one) else "open"

    return how


def test_an_answer_is_text_until_a_call_begins_and_then_nothing_but_calls(said) -> None:  # type: ignore[no-untyped-def]
    assert said(BLOCKS, "") == said(BLOCKS, "Hello < there, {") == said(BLOCKS, "Say <tool") == "whole"
    assert said(BLOCKS, "Hello\n<tool_call>") == "open"
    assert said(BLOCKS, f"Hello\n{ROME}") == said(BLOCKS, ROME) == said(BLOCKS, NOW) == "whole"
    assert said(BLOCKS, f"{ROME}\n{NOW}\n{ROME}") == "over"
    assert said(BLOCKS, f"{ROME} and more") == said(BLOCKS, "<tool_call> is a tag") == "wrong"


def test_a_call_is_of_a_function_that_there_is_with_arguments_of_its_schema(said) -> None:  # type: ignore[no-untyped-def]
    for old, new in (("weather", "climate"), ("Rome", "Bonn"), ("3", "0"), ('"days"', '"hours"'), ("3}", '3, "x": 1}')):
        assert said(BLOCKS, ROME.replace(old, new)) == "wrong", new
    assert said(BLOCKS, NOW.replace("{}", '{"x": 1}')) == "wrong"


def test_where_a_call_is_required_there_is_no_text(said) -> None:  # type: ignore[no-untyped-def]
    required = dataclasses.replace(BLOCKS, text=False, most=1)
    assert said(required, "Hello") == "wrong"
    assert said(required, "") == "open"
    assert said(required, ROME) == "over"


def test_text_may_have_to_follow_a_schema_of_its_own(said) -> None:  # type: ignore[no-untyped-def]
    answer = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    assert said(BLOCKS, '{"a": 1}', answer) == "over"
    assert said(BLOCKS, ROME, answer) == "whole"
    assert said(BLOCKS, "Hello", answer) == said(BLOCKS, '{"a": "b"}', answer) == "wrong"


def test_without_a_marker_the_first_character_decides(said) -> None:  # type: ignore[no-untyped-def]
    call = '{"name": "weather", "parameters": {"city": "Oslo"}}'
    assert said(BARE, call) == "over"
    assert said(BARE, "Hello {") == said(BARE, "") == "whole"
    assert said(BARE, "{x") == "wrong"


def test_a_special_token_marks_calls_and_its_name_in_other_tokens_does_not(
    grammars: Grammars, tokenizer: FileTokenizer
) -> None:
    rest = ' [{"name": "weather", "arguments": {"city": "Rome"}, "id": "'
    assert tokenizer.encode("[TOOL_CALLS]") == [MARK]
    one = grammars.start_calls(LIST, None)
    assert follow(one, [*tokenizer.encode("Well."), MARK]) is False
    assert END not in allowed(one)
    assert follow(one, tokenizer.encode(rest + 'a1Ba1Ba1B"}]')) is True
    assert follow(grammars.start_calls(LIST, None), [MARK, *tokenizer.encode(rest + 'a1Ba1Ba1-"}]')]) is None
    spelled = [token for letter in "[TOOL_CALLS]" for token in tokenizer.encode(letter)]
    other = grammars.start_calls(LIST, None)
    assert follow(other, spelled + tokenizer.encode("anything")) is False


def test_a_special_token_that_marks_calls_is_shown(grammars: Grammars, tokenizer: FileTokenizer) -> None:
    assert grammars.marks(LIST) == {MARK: "[TOOL_CALLS]"}
    assert grammars.marks(BLOCKS) == {}
    tokens = [*tokenizer.encode("Well. "), MARK, *tokenizer.encode(' [{"name"')]
    for marks, shown in ((grammars.marks(LIST), 'Well. [TOOL_CALLS] [{"name"'), ({}, 'Well.  [{"name"')):
        stream = TextStream(tokenizer, tokenizer.encode("x"), (), marks)
        assert "".join(map(stream.push, tokens)) + stream.finish() == shown


def test_reasoning_may_come_before_and_is_not_searched_for_calls(said) -> None:  # type: ignore[no-untyped-def]
    thinking = dataclasses.replace(BLOCKS, thoughts=(Thought(before="<think>", after="</think>"),))
    for text in ("", "Hi", "<thin", ROME, f"<think>\na <tool_call> b</think>\n\n{ROME}", "<think></think>Hi"):
        assert said(thinking, text) == "whole", text
    assert said(thinking, "<think>I never end") == "open"
    assert said(thinking, "<think>x</think><tool_call> is a tag") == "wrong"
    begun = dataclasses.replace(thinking, in_thought=True)
    assert said(begun, "") == said(begun, "a <tool_call> b") == "open"
    assert said(begun, f"x</think>\n{ROME}") == said(begun, "x</think>Hi") == "whole"
    required = dataclasses.replace(begun, text=False, most=1)
    assert said(required, "x</think>Hi") == "wrong"
    assert said(required, f"x</think>{ROME}") == "over"


def test_channels_come_in_their_order(tokenizer: FileTokenizer) -> None:
    library = Tokenizer.from_file(str(PATH))
    library.add_special_tokens([AddedToken(name, special=True) for name in HARMONY.tokens])
    channels = FileTokenizer(library.to_str().encode())
    grammars, form = Grammars(channels, library.get_vocab_size(), [END]), HARMONY.calls
    assert form is not None
    calls = Calls(
        functions=FUNCTIONS,
        before=form.before,
        between=form.between,
        next=form.next,
        after=form.after,
        opening=HARMONY.answer,
        thoughts=HARMONY.thoughts("start"),
    )
    assert {*grammars.marks(None, HARMONY.tokens).values()} == {*HARMONY.tokens}

    def how(text: str) -> str:
        one = grammars.start_calls(calls, None)
        for token in channels.encode(text):
            if not int.from_bytes(one.allowed, "little") >> token & 1:
                return "wrong"
            if one.take(token):
                return "over"
        return "whole" if int.from_bytes(one.allowed, "little") >> END & 1 else "open"

    analysis = "<|channel|>analysis<|message|>Let me\nsee.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}'
    assert how("<|channel|>final<|message|>Hi") == how(f"{analysis}<|channel|>final<|message|>Hi") == "whole"
    assert how(call) == how(analysis + analysis.replace("analysis", "commentary") + call) == "over"
    assert how(analysis) == "open"
    assert how("Hi") == how(call.replace("Rome", "Bonn")) == how(analysis + "Hi") == "wrong"


def written(*arguments: tuple[str, str], name: str = "weather") -> str:
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


def one_by_one(schema: dict[str, object], *, strict: bool = False) -> Calls:
    form = probe_format(compiled(LINES)).form
    texts = {name: getattr(form, name) for name in ("before", "between", "next", "after", "marker")}
    texts |= {name: getattr(form, name) for name in ("parameter_before", "parameter_between", "parameter_after")}
    function = Function(name="weather", arguments=json.dumps(schema), strict=strict)
    return Calls(functions=(function, FUNCTIONS[1]), most=3, **texts)


def test_arguments_that_are_written_one_by_one_have_the_types_of_their_schema(said) -> None:  # type: ignore[no-untyped-def]
    properties = {
        "city": {"type": "string"},
        "days": WEATHER["properties"]["days"],  # type: ignore[index]
        "unit": {"enum": ["C", "F"]},
        "tags": {"$ref": "#/$defs/tags"},
    }
    tags = {"type": "array", "items": {"type": "string"}}
    calls = one_by_one({"type": "object", "properties": properties, "required": ["city"], "$defs": {"tags": tags}})
    city = ("city", "Ro\nme </b>")
    for arguments in ([city], [city, ("days", "3"), ("unit", "F"), ("tags", '["a", "b"]')], [city, ("tags", "[]")]):
        assert said(calls, f"Well. {written(*arguments)}") == "whole", arguments
    for wrong in (
        [],
        [("days", "3")],
        [city, ("days", "x")],
        [city, ("unit", "K")],
        [city, ("tags", "a")],
        [("x", "y")],
    ):
        assert said(calls, written(*wrong)) == "wrong", wrong
    assert said(calls, f"{written(city)}\n{written(name='weather_now')}\n{written(city)}") == "over"


def test_other_arguments_are_allowed_where_the_schema_allows_them(said) -> None:  # type: ignore[no-untyped-def]
    assert said(one_by_one({"type": "object"}), written(("any", "7"), ("thing", "a"))) == "whole"
    numbers = one_by_one({"type": "object", "additionalProperties": {"type": "integer"}})
    assert said(numbers, written(("any", "7"))) == "whole"
    assert said(numbers, written(("any", "x"))) == "wrong"


def test_arguments_may_follow_a_name_without_text_between(said) -> None:  # type: ignore[no-untyped-def]
    """As GLM-4.7 writes them, also where one name is the beginning of another."""
    texts = {"before": "<tool_call>", "between": "", "next": "</tool_call><tool_call>", "after": "</tool_call>"}
    texts |= {"marker": "<tool_call>", "parameter_before": "<key>", "parameter_after": "</value>"}
    calls = Calls(functions=FUNCTIONS, most=3, parameter_between="</key><value>", **texts)
    rome = "<tool_call>weather<key>city</key><value>Rome</value></tool_call>"
    assert said(calls, rome) == said(calls, "<tool_call>weather_now</tool_call>") == "whole"
    assert said(calls, f"{rome}<tool_call>weather_now</tool_call>{rome}") == "over"
    assert said(calls, "<tool_call>weather_no<key>") == said(calls, "<tool_call>weather</tool_call>") == "wrong"


def test_a_strict_function_whose_strings_cannot_be_followed_one_by_one_is_refused(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}}}
    with pytest.raises(GrammarError, match="'weather': maxLength of a string cannot be followed"):
        grammars.start_calls(one_by_one(schema, strict=True), None)


@pytest.mark.parametrize("seed", range(10))
def test_whatever_is_drawn_from_the_allowed_tokens_is_valid_calls(
    grammars: Grammars, tokenizer: FileTokenizer, seed: int
) -> None:
    grammar, chance = grammars.start_calls(dataclasses.replace(BLOCKS, text=False), None), random.Random(seed)
    text = b""
    while True:
        token = chance.choice(allowed(grammar))
        text += b"" if token == END else tokenizer.piece(token)
        if token == END or grammar.take(token):
            break
    calls = text.decode().removesuffix("\n</tool_call>").split("\n</tool_call>\n")
    assert 1 <= len(calls) <= 3
    for call in calls:
        made = json.loads(call.removeprefix("<tool_call>\n"))
        if made["name"] == "weather":
            assert made["arguments"]["city"] in ("Rome", "Oslo")
        else:
            assert made == {"name": "weather_now", "arguments": {}}


@pytest.mark.parametrize(
    ("schema", "strict", "reason"),
    [
        ({"type": "objecto"}, False, "'f': the schema is not that of an object"),
        ({"type": "string"}, False, "not that of an object"),
        ({"properties": {"a": {"type": "objecto"}}}, False, "'f': Invalid type: objecto"),
        ({"properties": {"a": {"type": "string", "not": {}}}}, True, "'f': .*not"),
        ({"properties": {"a": {"pattern": "(?=x)"}}}, False, "'f': .*look-around"),
        ([], False, "no JSON object"),
        ("x" * 300_000, False, "longer than"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_arguments_that_cannot_be_followed_are_named_in_one_line(
    grammars: Grammars, schema: object, strict: bool, reason: str
) -> None:
    wrong = Function(name="f", arguments=json.dumps(schema), strict=strict)
    with pytest.raises(GrammarError, match=reason) as caught:
        grammars.start_calls(dataclasses.replace(BLOCKS, functions=(*FUNCTIONS, wrong)), None)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_what_a_grammar_cannot_say_is_passed_over_unless_the_function_is_strict(said) -> None:  # type: ignore[no-untyped-def]
    schema = {"properties": {"a": {"type": "string", "format": "colour"}}, "required": ["a"], "not": {}}
    loose = dataclasses.replace(BLOCKS, functions=(Function(name="paint", arguments=json.dumps(schema)),))
    assert said(loose, '<tool_call>\n{"name": "paint", "arguments": {"a": "red"}}\n</tool_call>') == "whole"


def test_a_call_that_would_end_the_text_is_refused(grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match="an end token is part of the calls"):
        grammars.start_calls(dataclasses.replace(LIST, after="]<|endoftext|>"), None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"functions": ()},
        {"before": ""},
        {"between": ""},
        {"marker": "x"},
        {"most": 0},
        {"next": ""},
        {"in_thought": True},
        {"parameter_before": "x"},
    ],
)
def test_calls_that_cannot_be_written_are_no_message(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        dataclasses.replace(BLOCKS, **wrong)  # type: ignore[arg-type]
