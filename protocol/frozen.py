"""Frozen dataclasses that cost little to define.

A command defines two hundred of them while it starts. Of the methods that `dataclass` compiles for each, only
`__init__` need differ from class to class; comparing, hashing and showing are here, once for all. `frozen=True` would
compile two more, and fill each instance more slowly: here the type checker holds that nobody changes one, not the
interpreter. What this saves is in README.md.

`dataclasses.fields`, `replace` and protocol/schema.py take them as they take any dataclass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform, overload

T = TypeVar("T")


@overload
def frozen(cls: type[T], /) -> type[T]: ...
@overload
def frozen(*, kw_only: bool = False, slots: bool = False) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T] | None = None, /, *, kw_only: bool = False, slots: bool = False) -> Any:
    """Make `cls` a dataclass that nobody changes; methods of its own stay. Two instances are equal when they are of one
    class and all of their fields are."""

    def make(cls: type[T]) -> type[T]:
        own = {name for name, method in cls.__dict__.items() if method is not None}  # __hash__, beside an __eq__
        made: Any = dataclass(eq=False, repr=False, kw_only=kw_only, slots=slots)(cls)
        made.__values__ = _values(*(one.name for one in fields(made)))
        for name, method in (("__eq__", _equal), ("__hash__", _hash), ("__repr__", _show)):
            if name not in own:
                setattr(made, name, method)
        return made  # type: ignore[no-any-return]

    return make if cls is None else make(cls)


def _values(*names: str) -> Callable[[Any], Any]:
    """What takes the values of these fields; attrgetter wants one at least."""
    return attrgetter(*names) if names else lambda _: ()


def _equal(self: Any, other: Any) -> Any:
    values = self.__class__.__values__
    return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented


def _hash(self: Any) -> int:
    return hash(self.__class__.__values__(self))


def _show(self: Any) -> str:
    shown = (f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.repr)
    return f"{self.__class__.__qualname__}({', '.join(shown)})"
