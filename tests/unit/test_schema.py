"""The typed reader of files: strict about what stands in them, and one line that names file and field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.schema import from_json, json_object

T = TypeVar("T")


@dataclass(frozen=True)
class Point:
    """Nested in others."""

    size: int
    speed: float

    def __post_init__(self) -> None:
        if self.speed <= 0:
            raise ValueError("expected a speed above 0")


@dataclass(frozen=True)
class Curve:
    """One field of every kind."""

    name: str
    kind: Literal["a", "b"]
    points: tuple[Point, ...]
    limit: int | None = None


@dataclass(frozen=True)
class Kept(Generic[T]):
    """Whatever it is, and when."""

    measured: T
    at: float


RIGHT: dict[str, Any] = {"name": "x", "kind": "a", "points": [{"size": 1, "speed": 2}]}


def test_a_file_is_read_as_its_dataclass_says() -> None:
    assert from_json(Curve, RIGHT, "f.json") == Curve("x", "a", (Point(1, 2.0),))
    assert from_json(Curve, RIGHT | {"limit": None}, "f.json").limit is None


def test_a_generic_dataclass_is_read_with_its_parameter() -> None:
    values = {"measured": {"size": 1, "speed": 2.5}, "at": 3}
    assert from_json(Kept[Point], values, "f.json") == Kept(Point(1, 2.5), 3.0)
    with pytest.raises(UserError, match=r"field 'measured': expected a whole number"):
        from_json(Kept[int], values, "f.json")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"name": 1}, "f.json: field 'name': expected printable text, found 1"),
        ({"name": "a\x1b[2J"}, r"f.json: field 'name': expected printable text, found 'a\x1b[2J'"),
        ({"kind": "c"}, "f.json: field 'kind': 'c' is not one of a, b"),
        ({"points": 3}, "f.json: field 'points': expected a list, found 3"),
        ({"points": [3]}, "f.json: field 'points[0]': expected an object, found 3"),
        ({"points": [{"size": 1}]}, "f.json: field 'points[0].speed': missing"),
        ({"points": [{"size": 1, "speed": -1}]}, "f.json: field 'points[0]': expected a speed above 0"),
        (
            {"points": [{"size": True, "speed": 1}]},
            "f.json: field 'points[0].size': expected a whole number, found True",
        ),
        (
            {"points": [{"size": 1, "speed": 1, "x": 1}]},
            "f.json: field 'points[0].x': unknown field; a newer version may understand it",
        ),
        ({"limit": 1 << 63}, f"f.json: field 'limit': expected a whole number of 64 bits, found {1 << 63}"),
        ({"other": 1}, "f.json: field 'other': unknown field; a newer version may understand it"),
        ({"a\nb": 1}, r"f.json: field 'a\nb': unknown field; a newer version may understand it"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        from_json(Curve, RIGHT | change, "f.json")
    assert str(caught.value) == complaint


@pytest.mark.parametrize("speed", [float("inf"), float("nan"), 10**400, -(10**400)])
def test_a_number_is_finite(speed: float) -> None:
    with pytest.raises(UserError, match=r"f\.json: field 'speed': expected a finite number"):
        from_json(Point, {"size": 1, "speed": speed}, "f.json")


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[]", "expected a JSON object"),
        (b'{"a": 1, "a": 2}', "the field 'a' appears twice"),
        (b'{"a": {"b": 1, "b": 1}}', "the field 'b' appears twice"),
        (b'{"a": NaN}', "NaN is not a number"),
        (b"[" * 100_000, "f.json: "),
    ],
)
def test_what_is_no_json_object_is_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        json_object(data, "f.json")


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
ANYTHING = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)


@given(change=st.dictionaries(st.sampled_from([*RIGHT, "limit"]) | st.text(), ANYTHING))
def test_whatever_stands_in_a_file_it_is_read_whole_or_refused_in_one_line(change: dict[str, Any]) -> None:
    refused = None
    try:
        assert isinstance(from_json(Curve, RIGHT | change, "f.json"), Curve)
    except UserError as error:
        refused = str(error)
    if refused is not None:
        assert refused.startswith("f.json: field '")
        assert refused.isprintable()
        assert len(refused) < 300
