"""Options of a request: each is declared once, as a field of its message, and everything else follows from there.

    temperature: Annotated[float, SAMPLING, Range(0, 100)] = 0.0

The field gives an option its name, type, default and range; the line of the message's docstring says what it does. The
coordinator checks the ranges. SAMPLING marks what says how tokens are sampled: the command line offers it as
`--repetition-penalty`, HTTP as a field, SPEC.md in a table, and the coordinator hands it to the native sampler.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_args, get_type_hints

from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.schema import documented

Mark = TypeVar("Mark")


@frozen
class Range:
    """The numbers that a field may hold. NaN is in no range.

    above: whether the least number itself is left out
    """

    least: float
    most: float
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.least < value if self.above else self.least <= value) and value <= self.most

    def __str__(self) -> str:
        if self.above:
            return f"above {self.least:,}, up to {self.most:,}"
        return f"between {self.least:,} and {self.most:,}"


@frozen
class Sampling:
    """Marks a field that says how tokens are sampled: a number or a switch.

    reads_text: whether it looks at the text so far, unless it has its default
    """

    reads_text: bool = False


SAMPLING, PENALTY = Sampling(), Sampling(reads_text=True)


@frozen
class Option:
    """What is declared of one option.

    kind: float, int or bool
    range: of a number; a switch has none
    meaning: one line for a person
    """

    name: str
    kind: type
    default: float
    range: Range | None
    reads_text: bool
    meaning: str


def ranges_of(cls: Any) -> dict[str, Range]:
    """The fields of a message that have a range, and theirs."""
    marks = {name: _mark(hint, Range) for name, hint in get_type_hints(cls, include_extras=True).items()}
    return {name: mark for name, mark in marks.items() if mark is not None}


def sampling_options_of(cls: Any) -> tuple[Option, ...]:
    """The fields of a message that are marked with SAMPLING or PENALTY, in its order."""
    hints, kinds, ranges = get_type_hints(cls, include_extras=True), get_type_hints(cls), ranges_of(cls)
    _, meanings = documented(cls)
    options = []
    for field in fields(cls):
        name, mark, default = field.name, _mark(hints[field.name], Sampling), field.default
        if mark is None:
            continue
        if default is MISSING or (kinds[name], name in ranges) not in ((float, True), (int, True), (bool, False)):
            raise TypeError(f"{cls.__name__}.{name}: expected a number with a range, or a bool; and a default")
        options.append(Option(name, kinds[name], default, ranges.get(name), mark.reads_text, meanings[name]))
    return tuple(options)


def _mark(hint: object, kind: type[Mark]) -> Mark | None:
    """What `Annotated` says of this kind."""
    return next((mark for mark in get_args(hint)[1:] if isinstance(mark, kind)), None)
