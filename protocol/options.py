"""Options of a request. Each is declared once, as a field of its message, and everything else follows from that.

    temperature: Annotated[float, SAMPLING, Range(0, 100)] = 0.0

The field gives an option its name, type, default and range; the line of the message's docstring describes it. The
coordinator checks the ranges. SAMPLING marks options of sampling: the command line offers them as
`--repetition-penalty`, HTTP as a field and SPEC.md in a table, and the coordinator passes them to the native sampler.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.marks import Range, mark_of, marks_of
from neuronpipe.protocol.schema import documented


@frozen
class Sampling:
    """Marks a field, a number or a switch, as an option of sampling.

    reads_text: the option depends on the tokens of the sequence, unless it has its default
    """

    reads_text: bool = False


SAMPLING, PENALTY = Sampling(), Sampling(reads_text=True)


@frozen
class Option:
    """The declaration of one option.

    kind: float, int or bool
    range: range of a number; None for a switch
    reads_text: as in `Sampling`
    meaning: one line for a person
    """

    name: str
    kind: type
    default: float
    range: Range | None
    reads_text: bool
    meaning: str


def sampling_options_of(cls: Any) -> tuple[Option, ...]:
    """Return the options of sampling of a message, its fields with a `Sampling` mark, in the order of the fields."""
    hints, kinds, ranges = get_type_hints(cls, include_extras=True), get_type_hints(cls), marks_of(cls, Range)
    _, meanings = documented(cls)
    options = []
    for field in fields(cls):
        name, mark, default = field.name, mark_of(hints[field.name], Sampling), field.default
        if mark is None:
            continue
        if default is MISSING or (kinds[name], name in ranges) not in ((float, True), (int, True), (bool, False)):
            raise TypeError(f"{cls.__name__}.{name}: expected a number with a range, or a bool; and a default")
        options.append(Option(name, kinds[name], default, ranges.get(name), mark.reads_text, meanings[name]))
    return tuple(options)
