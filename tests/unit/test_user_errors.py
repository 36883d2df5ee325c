"""What a person sees of an error stays one harmless line, whatever names a damaged file brings."""

from __future__ import annotations

import pytest
from neuronpipe.protocol.errors import MAX_QUOTED_CHARACTERS, UserError, quoted, safe_name


def test_control_characters_are_shown_and_not_obeyed() -> None:
    assert str(UserError("a.gguf: na\n\x1b[2Jme: größer")) == "a.gguf: na\\n\\x1b[2Jme: größer"


def nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    ["x" * 100_000, "\0\x1b[2J\ud800\n" * 100, 10**4000, nested(900), {"k" * 1000: ["v" * 1000] * 1000}, b"\0" * 99],
)
def test_a_foreign_value_is_quoted_on_one_line_and_cut(value: object) -> None:
    shown = quoted(value)
    assert len(shown) <= MAX_QUOTED_CHARACTERS
    assert shown.isprintable()
    assert shown.endswith(("...", "]"))


@pytest.mark.parametrize("name", ["x" * 100_000, "\0\x1b[2J\ud800\n" * 100])
def test_a_foreign_name_is_shown_on_one_line_and_cut(name: str) -> None:
    assert len(safe_name(name)) == MAX_QUOTED_CHARACTERS
    assert safe_name(name).isprintable()


def test_short_values_are_quoted_as_they_are() -> None:
    assert [quoted(value) for value in ("gelu", None, ["Falcon"], 0.5)] == ["'gelu'", "None", "['Falcon']", "0.5"]
    assert safe_name("größer.weight") == "größer.weight"
