"""Marks of fields, which an annotation carries: `scale: Annotated[float, Range(1e-6, 1e6)] = 1.0`.

A field declares with them what it may hold and whether files must have it. Readers, checks and documentation follow
from the declaration.
"""

from __future__ import annotations

from typing import Any, TypeVar, get_type_hints

from neuronpipe.protocol.frozen import frozen

Mark = TypeVar("Mark")


@frozen
class Range:
    """The numbers that a field may hold, or the number of a text's characters. NaN is in no range.

    exclusive: the minimum itself is not in the range
    """

    minimum: float
    maximum: float
    exclusive: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.minimum < value if self.exclusive else self.minimum <= value) and value <= self.maximum

    def __str__(self) -> str:
        if self.exclusive:
            return f"above {self.minimum:,}, up to {self.maximum:,}"
        return f"between {self.minimum:,} and {self.maximum:,}"


@frozen
class Required:
    """Marks a field that files always have, although it has a default: the format is older than the default.

    Files leave out other fields that have their defaults, so that a new field changes no file.
    """


REQUIRED = Required()


def marks_of(cls: Any, kind: type[Mark]) -> dict[str, Mark]:
    """Return the mark of this kind of each field that has one, by the field's name."""
    marks = {name: mark_of(hint, kind) for name, hint in get_type_hints(cls, include_extras=True).items()}
    return {name: mark for name, mark in marks.items() if mark is not None}


def mark_of(hint: object, kind: type[Mark]) -> Mark | None:
    """Return the mark of this kind in an `Annotated` hint; None if it has none."""
    return next((mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, kind)), None)
