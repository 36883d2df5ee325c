"""Frozen dataclasses of ours behave as those of the standard library do, and define themselves in less time."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
import timeit
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.protocol.frozen import frozen

from tests.pipeline import ROOT

Kind = Any


@frozen(kw_only=True, slots=True)
class Sealed:
    """At the top of a module, where pickle finds it."""

    size: int
    names: tuple[str, ...] = ()


def kinds(decorate: Any) -> dict[str, Kind]:
    """The same classes, decorated in one way or the other."""

    @decorate
    class Empty:
        pass

    @decorate
    class One:
        number: float

    @decorate
    class Base:
        number: int = 1
        text: str = dataclasses.field(default="a", repr=False)

    @decorate
    class Derived(Base):
        inner: One = One(2.0)

    @decorate
    class Showing:
        number: int

        def __repr__(self) -> str:
            return "shown"

    @decorate
    class Comparing:
        number: int

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Comparing)

    @decorate
    class Hashing:
        number: int

        def __hash__(self) -> int:
            return 7

    return {cls.__name__: cls for cls in (Empty, One, Base, Derived, Showing, Comparing, Hashing)}


OURS, THEIRS = kinds(frozen), kinds(dataclasses.dataclass(frozen=True))
CASES: list[tuple[str, tuple[Any, ...]]] = [
    ("Empty", ()),
    ("One", (1.5,)),
    ("One", ([],)),
    ("Base", ()),
    ("Base", (2, "b")),
    ("Derived", (2, "b")),
    ("Showing", (3,)),
    ("Comparing", (3,)),
    ("Hashing", (3,)),
]


def seen(kinds: dict[str, Kind], name: str, values: tuple[Any, ...]) -> dict[str, Any]:
    """What can be seen of an instance from outside."""
    one, same, cls = kinds[name](*values), kinds[name](*values), kinds[name]
    try:
        hashed: Any = hash(one) == hash(same)
    except TypeError as error:
        hashed = str(error)
    changed = dataclasses.replace(one, number=9) if values else one
    return {
        "repr": repr(one).replace(cls.__qualname__, name),
        "equal": one == same,
        "other value": one == changed,
        "other class": [one == other(2) for other in (kinds["One"], kinds["Base"]) if other is not cls],
        "no such class": one == object(),
        "hash": hashed,
        "fields": [field.name for field in dataclasses.fields(cls)],
        "matched": cls.__match_args__,
        "mapped": dataclasses.asdict(one) if name != "Derived" else None,
    }


@pytest.mark.parametrize(("name", "values"), CASES)
def test_they_are_seen_as_those_of_the_standard_library(name: str, values: tuple[Any, ...]) -> None:
    assert seen(OURS, name, values) == seen(THEIRS, name, values)


def test_slots_let_nothing_in_and_copies_are_equal() -> None:
    sealed = Sealed(size=1, names=("a",))
    assert not hasattr(sealed, "__dict__")
    with pytest.raises(AttributeError):
        sealed.other = 1  # type: ignore[attr-defined]
    assert copy.deepcopy(sealed) == pickle.loads(pickle.dumps(sealed)) == sealed
    with pytest.raises(TypeError):
        Sealed(1)  # type: ignore[misc]


def test_they_are_defined_in_less_time() -> None:
    """Two hundred are, while a command starts; measured: a third. The best of some tries: the machine may be busy."""
    body = "class Some:\n  a: int = 0\n  b: str = ''\n  c: float = 0.0\n  d: int = 0\n"
    theirs, ours = (
        min(timeit.repeat(f"{line}\n{body}", f"import dataclasses\n{imported}", number=20, repeat=9))
        for line, imported in (
            ("@dataclasses.dataclass(frozen=True)", ""),
            ("@frozen", "from neuronpipe.protocol.frozen import frozen"),
        )
    )
    assert ours < 0.75 * theirs


@pytest.mark.nightly
def test_the_type_checker_refuses_to_change_one(tmp_path: Path) -> None:
    (tmp_path / "changes.py").write_text(
        "from neuronpipe.protocol.messages.worker import Step\nfrom neuronpipe.protocol.marks import Range\n"
        "def change(step: Step, span: Range) -> None:\n    step.step = 1\n    span.minimum = 2\n"
    )
    words = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path), str(tmp_path / "changes.py")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert 'Property "step" defined in "Step" is read-only' in done.stdout
    assert 'Property "minimum" defined in "Range" is read-only' in done.stdout
