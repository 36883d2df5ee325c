"""Frozen dataclasses that cost little to define.

A command defines two hundred of them while it starts. `dataclass` compiles several methods for each class, but only
`__init__` has to differ from class to class: comparison, hash and repr are written once here. `frozen=True` would
compile two more and make construction slower, so the type checker alone enforces that instances are not changed.

`dataclasses.fields`, `dataclasses.replace` and protocol/schema.py accept these classes like any dataclass.
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
    """Make `cls` a dataclass whose instances must not be changed. Methods that it defines itself stay. Two instances
    are equal if they are of one class and all their fields are equal."""

    def make(cls: type[T]) -> type[T]:
        # Python sets __hash__ to None in a class that defines __eq__ alone.
        defined = {name for name, method in cls.__dict__.items() if method is not None}
        result: Any = dataclass(eq=False, repr=False, kw_only=kw_only, slots=slots)(cls)
        result.__values__ = _values(*(field.name for field in fields(result)))
        for name, method in (("__eq__", _equal), ("__hash__", _hash), ("__repr__", _show)):
            if name not in defined:
                setattr(result, name, method)
        return result  # type: ignore[no-any-return]

    return make if cls is None else make(cls)


def _values(*names: str) -> Callable[[Any], Any]:
    """Return a function that returns the values of these fields. attrgetter needs at least one name."""
    return attrgetter(*names) if names else lambda _: ()


def _equal(self: Any, operand: Any) -> Any:
    values = self.__class__.__values__
    return values(self) == values(operand) if operand.__class__ is self.__class__ else NotImplemented


def _hash(self: Any) -> int:
    return hash(self.__class__.__values__(self))


def _show(self: Any) -> str:
    items = (f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if field.repr)
    return f"{self.__class__.__qualname__}({', '.join(items)})"
