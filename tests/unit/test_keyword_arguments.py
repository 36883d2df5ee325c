"""Calls whose arguments are keywords, f(key=value) or f{key:value}: written, followed by a grammar, and read back."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from itertools import product
from typing import Any

import pytest
from neuronpipe.protocol.argument_syntax import ArgumentSyntax, Syntax
from neuronpipe.protocol.messages.request import Calls, Function
from neuronpipe.services.coordinator.text.grammar import Grammar, GrammarError, Grammars
from neuronpipe.services.coordinator.text.tokenizer import FileTokenizer
from neuronpipe.services.gateway.answers.answer_format import AnswerFormat, parse_answer
from neuronpipe.services.gateway.answers.call_parser import CallParser
from neuronpipe.services.gateway.answers.parts import Arguments
from neuronpipe.services.gateway.templates.call_format import TEXT_FORMATS, CallFormat
from neuronpipe.services.gateway.templates.format_probe import probe_format
from neuronpipe.services.gateway.templates.messages import ChatTurn, as_messages
from tokenizers import AddedToken, Tokenizer

from tests.unit.test_call_formats import compiled
from tests.unit.test_calls import PATH

LFM2 = next(form for marks, form in TEXT_FORMATS if "<|tool_list_start|>" in marks)
OLMO = CallFormat("<function_calls>", "(", ")\n", ")</function_calls>", "<function_calls>", argument_syntax="keywords")
GEMMA = CallFormat(
    before="<|tool_call>call:",
    between="{",
    next="}<tool_call|><|tool_call>call:",
    after="}<tool_call|>",
    marker="<|tool_call>",
    argument_syntax="gemma",
)
FORMS = {"python": LFM2, "keywords": OLMO, "gemma": GEMMA}
MARKS = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_call_start|>", "<|tool_call_end|>")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "inside": {"type": "boolean"},
        "unit": {"enum": ["C", "F", None]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {
            "type": "object",
            "properties": {"at": {"type": ["number", "null"]}, "near": {"$ref": "#/$defs/near"}},
        },
    },
    "required": ["city"],
    "$defs": {"near": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/$defs/near"}}]}},
}
FUNCTIONS = (
    Function(name="weather", arguments=json.dumps(SCHEMA)),
    Function(name="weather_now", arguments='{"type": "object", "properties": {}}'),
    Function(name="any", arguments='{"type": "object"}'),
)
VALUES: list[dict[str, Any]] = [
    {"city": "Rome"},
    {"city": 'a ")}], <x> \\ \n Köln', "days": -3, "inside": True},
    {"city": "", "unit": None, "tags": []},
    {"city": "x", "inside": False, "tags": ["a, b", "}", "c:d=e"], "place": {"at": 1.5e-3, "near": [["y"], "z"]}},
    {"city": "x", "place": {"at": None}},
]


@pytest.fixture(scope="module")
def tokenizer() -> FileTokenizer:
    library = Tokenizer.from_file(str(PATH))
    library.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return FileTokenizer(library.to_str().encode())


@pytest.fixture(scope="module")
def grammars(tokenizer: FileTokenizer) -> Grammars:
    pytest.importorskip("llguidance")
    return Grammars(tokenizer, 4096 + len(MARKS), [0])


def calls_in(form: CallFormat, **changed: Any) -> Calls:
    names = ("before", "between", "next", "after", "marker", "argument_syntax")
    fields: dict[str, Any] = {name: getattr(form, name) for name in names}
    return Calls(**{"functions": FUNCTIONS, "most": 3, **fields, **changed})


def outcome(grammar: Grammar, tokens: list[int]) -> str:
    """How a text goes: "over" when nothing can follow, "whole" when it may end, "open", or "wrong"."""
    for token in tokens:
        if not int.from_bytes(grammar.allowed, "little") >> token & 1:
            return "wrong"
        if grammar.take(token):
            return "over"
    return "whole" if int.from_bytes(grammar.allowed, "little") & 1 else "open"


def ordered(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments in the order of the schema."""
    return {name: arguments[name] for name in SCHEMA["properties"] if name in arguments}  # type: ignore[attr-defined]


def test_arguments_are_written_as_the_models_templates_write_them() -> None:
    arguments = json.dumps({"b": 'x"', "a": [True, None, {"k": 2}]})
    assert Syntax.of("python").written(arguments) == 'b="x\\"", a=[True, None, {"k": 2}]'
    assert Syntax.of("keywords").written(arguments) == 'b="x\\"", a=[true, null, {"k": 2}]'
    assert Syntax.of("gemma").written(arguments) == 'a:[true,None,{k:2}],b:<|"|>x"<|"|>'
    assert Syntax.of("python").written('{"cut": ') == '{"cut": '
    assert LFM2.written([("f", '{"a": 1}'), ("g", "{}")]) == "<|tool_call_start|>[f(a=1), g()]<|tool_call_end|>"


@pytest.mark.parametrize("syntax", FORMS)
@pytest.mark.parametrize("arguments", VALUES, ids=str)
def test_what_is_written_follows_the_grammar_and_is_read_back(
    grammars: Grammars, tokenizer: FileTokenizer, syntax: str, arguments: dict[str, Any]
) -> None:
    form = FORMS[syntax]
    calls = [("weather", json.dumps(ordered(arguments))), ("weather_now", "{}"), ("any", '{"x": {"y": [1, "z"]}}')]
    text = f"Well.\n{form.written(calls)}"
    assert outcome(grammars.start_calls(calls_in(form), None), tokenizer.encode(text)) == "over"
    answer = parse_answer(text, AnswerFormat(calls=form))
    assert (answer.text, answer.complete) == ("Well.", True)
    assert [(name, json.loads(written)) for name, written in answer.calls] == [(n, json.loads(a)) for n, a in calls]


@pytest.mark.parametrize("syntax", FORMS)
@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"days": 1},
        {"city": "x", "days": "y"},
        {"city": "x", "unit": "K"},
        {"city": "x", "tags": [1]},
        {"city": "x", "inside": 1},
        {"city": "x", "other": 1},
        {"city": "x", "place": {"near": 3}},
    ],
    ids=str,
)
def test_arguments_that_the_schema_does_not_allow_cannot_be_written(
    grammars: Grammars, tokenizer: FileTokenizer, syntax: str, wrong: dict[str, Any]
) -> None:
    text = FORMS[syntax].written([("weather", json.dumps(wrong))])
    assert outcome(grammars.start_calls(calls_in(FORMS[syntax]), None), tokenizer.encode(text)) == "wrong"


@pytest.mark.parametrize("syntax", FORMS)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_drawn_from_the_allowed_tokens_is_read_as_valid_arguments(
    grammars: Grammars, tokenizer: FileTokenizer, syntax: str, seed: int
) -> None:
    calls = calls_in(FORMS[syntax], text=False, most=1)
    grammar, chance = grammars.start_calls(calls, None), random.Random(seed)
    tokens = list[int]()
    while True:
        bits = int.from_bytes(grammar.allowed, "little")
        closing = [token for token in tokenizer.encode(FORMS[syntax].after + '"}])' + '<|"|>') if bits >> token & 1]
        allowed = [token for token in range(1, 4096 + len(MARKS)) if bits >> token & 1]
        token = chance.choice(closing if closing and len(tokens) > 60 else allowed)
        tokens.append(token)
        if grammar.take(token):
            break
        assert len(tokens) < 2000
    text = b"".join(tokenizer.piece(token) for token in tokens).decode(errors="replace")
    answer = parse_answer(text, AnswerFormat(calls=FORMS[syntax]))
    assert answer.complete
    ((name, written),) = answer.calls
    arguments = json.loads(written, strict=False)
    if name == "weather":
        assert arguments.keys() <= SCHEMA["properties"].keys()  # type: ignore[attr-defined]
        assert isinstance(arguments["city"], str)
        assert isinstance(arguments.get("inside", True), bool)
        assert all(isinstance(tag, str) for tag in arguments.get("tags", []))


def parsed_in_pieces(text: str, form: CallFormat, sizes: random.Random | None) -> tuple[list[str], str, bool]:
    """The names, all arguments, and whether the last call is complete."""
    parser, names, arguments, at = CallParser(form), list[str](), "", 0
    while at < len(text):
        size = len(text) if sizes is None else sizes.randint(1, 7)
        for part in parser.push(text[at : at + size]):
            if isinstance(part, Arguments):
                arguments += part.text
            names += [part.name] if hasattr(part, "name") else []
        at += size
    list(parser.finish())
    return names, arguments, parser.complete


@pytest.mark.parametrize("syntax", FORMS)
@pytest.mark.parametrize("seed", range(60))
def test_a_text_in_pieces_is_read_like_the_whole_also_if_it_is_damaged(syntax: str, seed: int) -> None:
    chance, form = random.Random(seed), FORMS[syntax]
    text = form.written([("weather", json.dumps(chance.choice(VALUES))) for _ in range(2)])
    for _ in range(chance.randint(0, 4)):
        at = chance.randrange(len(text))
        inserted = chance.choice(['"', "\\", ",", "}", ")", "]", "{", "[", ":", "=", " ", '<|"|>', "<|", "1e", "N"])
        text = text[:at] + chance.choice(["", inserted]) + text[at + chance.randint(0, 2) :]
    assert parsed_in_pieces(text, form, chance) == parsed_in_pieces(text, form, None)


@pytest.mark.parametrize("syntax", FORMS)
@pytest.mark.parametrize("part", ["[", "{a:", '{"a": ', "x", "1", "  ", '"', '<|"|>', "<|", "\\", ",", "1, ", "'"])
def test_what_never_ends_costs_bounded_time_and_memory(syntax: str, part: str) -> None:
    form = FORMS[syntax]
    equals = Syntax.of(form.argument_syntax).equals
    for begin in (f"{form.before}f{form.between}", f"{form.before}f{form.between}a{equals}"):
        parser, began, passed = CallParser(form), time.process_time(), 0
        list(parser.push(begin))
        for _ in range(2000):
            passed += sum(len(one.text) for one in parser.push(part * 8) if isinstance(one, Arguments))
        assert len(parser._buffer) < 4096
        assert passed < 200_000
        assert time.process_time() - began < 5


def test_what_a_syntax_cannot_enforce_is_refused_for_strict_functions(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}
    strict = Function(name="f", arguments=json.dumps(schema), strict=True)
    with pytest.raises(GrammarError, match="'f': maxLength cannot be followed in this call format"):
        grammars.start_calls(calls_in(GEMMA, functions=(strict,)), None)
    grammars.start_calls(calls_in(OLMO, functions=(strict,)), None)  # its values are JSON


def test_hostile_schemas_are_refused_in_one_line(grammars: Grammars) -> None:
    odd = {"type": "object", "properties": {"a=b": {}}, "required": ["a=b"]}
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(700):
        deep = {"type": "array", "items": deep}
    wide = {"type": "object", "properties": {f"p{number}": {"type": "null"} for number in range(5000)}}
    for schema, form in product((odd, {"type": "object", "properties": {"a": deep}}, wide), (LFM2, GEMMA)):
        function = Function(name="f", arguments=json.dumps(schema))
        with pytest.raises(GrammarError) as caught:
            grammars.start_calls(calls_in(form, functions=(function,)), None)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("change", [{"between": "", "parameter_before": "x"}, {"parameter_before": "x"}])
def test_keywords_and_parameters_exclude_each_other(change: dict[str, str]) -> None:
    texts = {"parameter_between": "x", "parameter_after": "x"} if "parameter_before" in change else {}
    with pytest.raises(ValueError, match="argument_syntax"):
        dataclasses.replace(calls_in(OLMO), **change, **texts)


KIMI = """{%- if tools %}{{ tools | tojson }}{% endif %}{%- for m in messages %}
{%- if m.tool_calls is defined %}[assistant]<|tool_calls_section_begin|>
    {%- for c in m.tool_calls -%}
        <|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>
    {%- endfor %}<|tool_calls_section_end|>[end]
{%- elif m.role == 'tool' %}## Return of {{ m.tool_call_id }}: {{ m.content }}
{%- else %}[{{ m.role }}]{{ m.content }}[end]{% endif %}{% endfor %}"""


def test_a_template_that_writes_ids_in_place_of_names_gets_names_in_ids() -> None:
    template = compiled(KIMI)
    form = probe_format(template).form
    assert form.numbered_ids
    assert form.before == "<|tool_calls_section_begin|><|tool_call_begin|>functions."
    turns = [
        ChatTurn("user", "Hi"),
        ChatTurn("assistant", "", calls=[("call_x", "f", "{}"), ("call_y", "g", '{"a": 1}')]),
        ChatTurn("tool", "one", tool_call_id="call_y"),
        ChatTurn("assistant", "", calls=[("call_x", "f", "{}")]),
        ChatTurn("tool", "two", tool_call_id="call_x"),
        ChatTurn("tool", "three", tool_call_id="call_z"),
    ]
    text = template.render(as_messages(turns, form), tools=[], answer=False)
    for id_ in ("functions.f:0", "functions.g:1", "functions.f:2"):
        assert f"<|tool_call_begin|>{id_}<|tool_call_argument_begin|>" in text
    for result in ("functions.g:1: one", "functions.f:2: two", "call_z: three"):
        assert f"## Return of {result}" in text


def test_each_syntax_has_a_form_here() -> None:
    assert FORMS.keys() | {""} == set(ArgumentSyntax.__args__)  # type: ignore[attr-defined]
