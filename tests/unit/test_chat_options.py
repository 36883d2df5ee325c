"""The options of sampling in a chat: every one that `Generate` declares can be set, shown and set back."""

from __future__ import annotations

from typing import Any

import pytest
from neuronpipe.launch.chat.options import OPTIONS, list_options, reset_option, set_option, show_option
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.request import MAX_TOKENS, SAMPLING_OPTIONS, Generate

from tests.unit.test_chat_session import chat  # noqa: F401 - a fixture

ASK = Generate(request="1", prompt="", max_tokens=MAX_TOKENS, temperature=0.8)


def test_every_declared_option_is_there() -> None:
    assert {option.name for option in SAMPLING_OPTIONS} | {"max_tokens", "seed"} == {*OPTIONS}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_set_within_its_range_and_set_back(name: str) -> None:
    option = OPTIONS[name]
    value, text = (True, "on") if option.range is None else (option.range.maximum, str(option.range.maximum))
    changed, line = set_option(ASK, f"{name} {text}")
    assert getattr(changed, name) == value
    assert line == ("max_tokens as many as fit" if name == "max_tokens" else f"{name} {text}")
    assert line == show_option(changed, name)
    assert reset_option(changed, ASK, name)[0] == ASK == reset_option(changed, ASK, "")[0]
    with pytest.raises(UserError, match=f"{name} '?sometimes'?: "):
        set_option(ASK, f"{name} sometimes")
    if option.range is not None:
        with pytest.raises(UserError, match=r"expected a .* (between|above)"):
            set_option(ASK, f"{name} {2 * option.range.maximum + 1}")


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("temperature=0.5", "temperature", 0.5),
        ("temp 0.5", "temperature", 0.5),
        ("--top-p 0.5", "top_p", 0.5),
        ("TOP-K 5", "top_k", 5),
        ("ignore_end", "ignore_end", True),
        ("ignore_end off", "ignore_end", False),
    ],
)
def test_an_option_is_known_by_several_spellings(text: str, name: str, value: float) -> None:
    assert getattr(set_option(ASK, text)[0], name) == value


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("temprature 1", "did you mean temperature?"),
        ("x 1", "there is no option 'x'"),
        ("top 1", "there is no option 'top'"),
        ("temperature", "temperature: expected a number between 0 and 100"),
        ("top_k 1.5", "top_k '1.5': expected a whole number"),
        ("temperature nan", "expected a number between 0 and 100"),
    ],
)
def test_what_cannot_be_set_is_told_what_can(text: str, complaint: str) -> None:
    with pytest.raises(UserError) as refused:
        set_option(ASK, text)
    assert complaint in str(refused.value)


@pytest.mark.parametrize("columns", [40, 80])
def test_the_list_fits_the_terminal_and_shows_what_holds(columns: int) -> None:
    lines = list_options(ASK, columns)
    assert max(map(len, lines.splitlines())) < columns
    assert "temperature 0.8" in lines
    assert "max_tokens as many as fit" in lines


def test_a_chat_answers_with_what_was_set(chat: Any, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    """`/set` was refused as an unknown word."""
    typed = "one\n/set temperature 0.7\n/set parameter top_k 3\ntwo\n/unset temperature\n/set x 1\n/set\n/show\nthree\n"
    client, lines, _ = chat(typed)
    assert [(ask.temperature, ask.top_k) for ask in client.asked] == [(0.0, 0), (0.7, 3), (0.0, 3)]
    assert lines[:3] == ["temperature 0.7", "top_k 3", "temperature 0"]
    assert lines[3] == "there is no option 'x'; /set lists the options"
    out = capsys.readouterr().out
    assert "divides the logits" in out
    assert "options   temperature 0, top_k 3, " in out
    assert "model     neuronpipe-demo" in out
