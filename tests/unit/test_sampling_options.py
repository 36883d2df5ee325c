"""Sampling options are declared once, in `Generate`: command line, HTTP, wire and native sampler agree on them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Annotated, Any

import pytest
from neuronpipe.launch.arguments.generation_arguments import add_generation_arguments, generation_options
from neuronpipe.native import ffi
from neuronpipe.protocol.codec import Message, Vocabulary, encode, message
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.marks import Range
from neuronpipe.protocol.messages.client import Refused
from neuronpipe.protocol.messages.request import RANGES, SAMPLING_OPTIONS, Generate
from neuronpipe.protocol.options import SAMPLING, Option, sampling_options_of
from neuronpipe.services.coordinator.scheduling.admission import Admission, Limits
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.http.request_body import parse_body
from neuronpipe.services.gateway.openai import request_schema as requests
from neuronpipe.services.gateway.openai.request_schema import CompletionRequest
from neuronpipe.services.gateway.openapi_description import openapi_document

NUMBERS = [option for option in SAMPLING_OPTIONS if option.range is not None]
OF_EVERY_WAY = {"request", "prompt", "tokens", "frame", "max_tokens", "stop", "seed", "share_prefix", "owner"}
OF_A_FORM = {
    "logit_bias",
    "grammar",
    "grammar_syntax",
    "calls",
    "logprobs",
    "stop_tokens",
    "shown_tokens",
}  # each way writes these in its own form
ON_THE_WIRE_ALONE = {"draft"}  # for measurements; a run turns drafts off by --without
IN_HTTP = {"ignore_end": "ignore_eos"}
PAGE = Path(requests.__file__).parents[1] / "page" / "index.html"
LIMITS = Limits(
    mode="exact",
    sequences=1,
    context_tokens=64,
    prefill_chunk_tokens=16,
    logit_rows=1,
    vocabulary=100,
    end_tokens=frozenset({0}),
    plan_id="p",
)


def by_command_line(*words: str) -> Generate:
    parser = argparse.ArgumentParser()
    add_generation_arguments(parser)
    return generation_options(parser.parse_args(["-p", "x", *words])).sampling.request("x")


def by_http(**body: Any) -> dict[str, Any]:
    return parse_body(json.dumps({"prompt": "x", **body}).encode(), CompletionRequest).options


def by_wire(**options: Any) -> Generate | Refused:
    ask = Vocabulary(Generate).decode(encode(Generate(request="r", tokens=(1,), **options)))
    assert isinstance(ask, Generate)
    checked = Admission(LIMITS, tokenizer=None).check(ask, 0)  # type: ignore[arg-type]
    return checked if isinstance(checked, Refused) else ask


def flag(option: Option) -> str:
    return "--" + option.name.replace("_", "-")


def taken(option: Option) -> list[float]:
    """Values at the ends of an option's range, and its default."""
    assert option.range is not None
    least = math.nextafter(option.range.minimum, math.inf) if option.range.exclusive else option.range.minimum
    return [option.kind(least), option.kind(option.range.maximum), option.default]


def refused(option: Option) -> list[float]:
    """Values just beyond the ends of an option's range."""
    assert option.range is not None
    least, most = option.kind(option.range.minimum), option.kind(option.range.maximum)
    if option.kind is int:
        return [least - 1, most + 1]
    return [
        least if option.range.exclusive else math.nextafter(least, -math.inf),
        math.nextafter(most, math.inf),
        math.nan,
    ]


def test_every_field_of_generate_is_an_option_or_has_a_form_of_its_own() -> None:
    """A new option that is not marked would be on the wire alone."""
    names = {field.name for field in dataclasses.fields(Generate)}
    assert names == {option.name for option in SAMPLING_OPTIONS} | OF_EVERY_WAY | OF_A_FORM | ON_THE_WIRE_ALONE


@pytest.mark.parametrize("option", NUMBERS, ids=lambda option: option.name)
def test_a_number_within_its_range_is_taken_by_every_way(option: Option) -> None:
    for value in taken(option):
        assert getattr(by_command_line(f"{flag(option)}={value!r}"), option.name) == value
        assert by_http(**{option.name: value})[option.name] == value
        assert isinstance(by_wire(**{option.name: value}), Generate)


@pytest.mark.parametrize("option", NUMBERS, ids=lambda option: option.name)
def test_a_number_beyond_its_range_is_refused_by_every_way(option: Option) -> None:
    for value in refused(option):
        with pytest.raises(UserError, match=f"^{flag(option)} {value}: {option.range}$"):
            by_command_line(f"{flag(option)}={value!r}")
        answer = by_wire(**{option.name: value})
        assert isinstance(answer, Refused)
        assert answer.message == f"{option.name} is out of range: {value}; it must be {option.range}"
        if option.name == "top_k" and value == -1:
            assert by_http(top_k=-1)["top_k"] == 0  # as other servers have it
            continue
        with pytest.raises(ApiError, match=f"^{option.name}: ") as raised:
            by_http(**{option.name: value})
        assert raised.value.status == 400


def test_a_switch_is_off_until_it_is_given() -> None:
    for option in SAMPLING_OPTIONS:
        if option.kind is bool:
            assert option.default is False
            assert getattr(by_command_line(flag(option)), option.name) is True
            assert by_http(**{IN_HTTP.get(option.name, option.name): True})[option.name] is True


def test_defaults_are_those_of_the_wire_but_for_three() -> None:
    wire = {option.name: option.default for option in SAMPLING_OPTIONS}
    assert {name: getattr(Generate(request="r", prompt=""), name) for name in wire} == wire
    assert by_http() == wire | {"temperature": 1.0}  # OpenAI's
    asked = by_command_line()
    assert {name: getattr(asked, name) for name in wire} == wire | {"temperature": 0.8, "top_p": 0.95}
    assert by_command_line("--json").temperature == 0


def test_names_and_meanings_are_the_same_everywhere() -> None:
    parser = argparse.ArgumentParser()
    add_generation_arguments(parser)
    helps = {action.option_strings[0]: action.help or "" for action in parser._actions}
    fields = openapi_document("1")["components"]["schemas"]["CompletionRequest"]["properties"]
    for option in SAMPLING_OPTIONS:
        assert helps[flag(option)].startswith(option.meaning)
        description = fields[IN_HTTP.get(option.name, option.name)]["anyOf"][0]["description"]
        assert description.lower().startswith(option.meaning.lower())
    assert "--repeat-penalty" not in helps


def test_the_native_sampler_has_a_field_for_every_number() -> None:
    """Its other fields are pointers and counts."""
    fields = {name: field.type.cname for name, field in ffi.typeof("np_sampling").fields}
    numbers = {name: kind for name, kind in fields.items() if kind in ("float", "int32_t")}
    assert numbers == {option.name: {float: "float", int: "int32_t"}[option.kind] for option in NUMBERS}


def test_the_pages_settings_stay_within_the_ranges() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for field, name in (("temperature", "temperature"), ("penalty", "repetition_penalty"), ("tokens", "max_tokens")):
        (limits,) = re.findall(rf'id="{field}" type="number" min="(\S+)" max="(\S+)"', text)
        assert all(float(limit) in RANGES[name] for limit in limits)


def test_a_range_says_whether_its_least_number_is_in_it() -> None:
    assert [value in Range(0, 1) for value in (0, 1, 2, -1, math.nan)] == [True, True, False, False, False]
    assert [value in Range(0, 1, exclusive=True) for value in (0, 1e-300, 1, math.nan)] == [False, True, True, False]
    assert (str(Range(0.01, 1000)), str(Range(0, 1, exclusive=True))) == ("between 0.01 and 1,000", "above 0, up to 1")


@message
class WithoutRange(Message):
    """A number whose range was forgotten.

    heat: how hot
    """

    heat: Annotated[float, SAMPLING] = 0.0


@message
class WithoutDefault(Message):
    """An option that every client would have to give.

    heat: how hot
    """

    heat: Annotated[float, SAMPLING, Range(0, 1)]


@message
class WithText(Message):
    """An option that is neither a number nor a switch.

    heat: how hot
    """

    heat: Annotated[str, SAMPLING] = "a"


@pytest.mark.parametrize("cls", [WithoutRange, WithoutDefault, WithText])
def test_an_option_that_is_declared_in_part_is_refused_at_once(cls: type[Message]) -> None:
    with pytest.raises(TypeError, match=f"^{cls.__name__}.heat: expected a number with a range"):
        sampling_options_of(cls)
