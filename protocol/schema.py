"""Checks of plain values, parsed from a file or a message, against the annotations of a dataclass.

The annotation of each field is turned into a function once per class:

    int, float, str, bytes, bool   that type and no other; an int is accepted as a float, a bool never as an int
    T | None                       null or T
    Literal[...]                   one of the values
    tuple[T, ...]                  array of T
    dict[str, T]                   map
    Annotated[T, ...]              T; the other arguments are for protocol/options.py
    a dataclass                    map of its fields; its __post_init__ raises ValueError for contradictory fields

Messages are read leniently: a newer peer may send fields that are not known here. Files are read strictly: unknown and
repeated fields, numbers that are not finite or need more than 64 bits, and text with control characters are refused.
plans/strict_json.py reads formats of other programs, field by field.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from neuronpipe.protocol.errors import UserError, quoted, safe_name

T = TypeVar("T")
Reader = Callable[[Any], Any]
_NOTHING = object()
_UNIONS = (types.UnionType, Union)  # Python turns `Literal[...] | None` into the second


class Mismatch(Exception):
    """A value that does not fit its annotation. Each level prepends its part of the path to the value."""

    def __init__(self, problem: str, value: object = _NOTHING) -> None:
        self.problem, self.value = problem, value
        self.path = ""


def json_object(data: bytes, where: str, parse_constant: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """Parse the JSON object in `data`. Repeated fields are refused; NaN and infinities too, unless `parse_constant`
    returns values for them. Raises UserError that begins with `where`."""
    constant = parse_constant or _refuse_constant
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_refuse_repeated, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a JSON object")
    return value


def from_json(cls: type[T], values: dict[str, Any], where: str) -> T:
    """Read a dataclass strictly from the content of a file of this project. Raises UserError that begins with `where`
    and names the field."""
    kind: Any = cls
    try:
        read: T = reader(kind, strict=True)(values)
    except Mismatch as mismatch:
        value_text = "" if mismatch.value is _NOTHING else f", found {quoted(mismatch.value)}"
        place = f"{where}: field '{safe_name(mismatch.path[1:])}'" if mismatch.path else where
        raise UserError(f"{place}: {mismatch.problem}{value_text}") from None
    return read


def describe(annotation: object) -> str:
    """Return an annotation as SPEC.md writes it: 'int', 'array of int', '"none" or "last"', ..."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in arguments)
    if origin is tuple:
        return f"array of {describe(arguments[0])}"
    if origin is dict:
        return f"map of {describe(arguments[1])}"
    if origin in _UNIONS:
        return f"{describe(present(annotation))} or nil"
    return getattr(annotation, "__name__", str(annotation))


def documented(cls: Any) -> tuple[str, dict[str, str]]:
    """Return the description of a dataclass and the meanings of its fields, by name, from its docstring."""
    text = inspect.getdoc(cls) or ""
    description, _, field_lines = text.partition("\n\n")
    entries = re.findall(r"^(\w+): (.*(?:\n +.*)*)", field_lines, re.MULTILINE)
    return one_line(description), {name: one_line(meaning) for name, meaning in entries}


def one_line(text: str) -> str:
    """Return the text with single spaces for its line ends and indents."""
    return " ".join(text.split())


def present(annotation: object) -> object:
    """Return the T of `T | None`. Raises TypeError for any other union."""
    types_but_none = [part for part in get_args(annotation) if part is not types.NoneType]
    if len(types_but_none) != 1 or len(get_args(annotation)) != 2:
        raise TypeError(f"{annotation}: a field can be T or T | None, no other union")
    return types_but_none[0]


def annotated(cls: Any) -> Iterator[tuple[Field[Any], Any]]:
    """Return the fields of a dataclass and their annotations. In a generic one, such as `Cached[Speed]`, type
    parameters are replaced by their arguments."""
    plain = get_origin(cls) or cls
    arguments = dict(zip(getattr(plain, "__parameters__", ()), get_args(cls), strict=True))
    hints = get_type_hints(plain)
    return ((field, arguments.get(hints[field.name], hints[field.name])) for field in fields(plain))


@cache
def reader(annotation: Any, *, strict: bool = False) -> Reader:
    """Return the function that checks a value against `annotation` and returns it in its final form: arrays as tuples,
    maps as dataclasses. It raises Mismatch."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is float:
        return _finite if strict else _float
    if strict and annotation in _STRICT:
        return _STRICT[annotation]
    if annotation in (int, str, bytes, bool):
        return _exactly(annotation)
    if origin is Literal:
        return _one_of(annotation)
    if origin in _UNIONS:
        inner = reader(present(annotation), strict=strict)
        return lambda value: None if value is None else inner(value)
    if origin is tuple and arguments[1:] == (...,):
        return _array_of(arguments[0], strict)
    if origin is dict and arguments[0] is str:
        return _map_of(arguments[1], strict)
    if is_dataclass(origin or annotation):
        return _dataclass(annotation, strict)
    raise TypeError(f"{annotation}: no type of a field")


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the field {quoted(name)} appears twice")
        result[name] = value
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number here")


def _exactly(kind: type) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise Mismatch(f"expected {kind.__name__}", value)
        return value

    return read


def _float(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value)
    raise Mismatch("expected float", value)


def _finite(value: Any) -> float:
    try:
        number = _float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):  # 1e999 reads as infinity
        raise Mismatch("expected a finite number", value)
    return number


def _int_of_64_bits(value: Any) -> int:
    if type(value) is not int:
        raise Mismatch("expected int", value)
    if not -(1 << 63) <= value < 1 << 63:
        raise Mismatch("expected an int of 64 bits", value)
    return value


def _printable(value: Any) -> str:
    if type(value) is not str or not value.isprintable():  # it may be printed, and control characters act on a terminal
        raise Mismatch("expected printable text", value)
    return value


_STRICT: dict[Any, Reader] = {int: _int_of_64_bits, str: _printable}


def _one_of(annotation: Any) -> Reader:
    # Keyed by type as well: True == 1 and 1.0 == 1 in Python, but not on the wire.
    values = {(type(value), value) for value in get_args(annotation)}
    kinds = {kind for kind, _ in values}

    def read(value: Any) -> Any:
        if type(value) not in kinds or (type(value), value) not in values:
            raise Mismatch(f"expected {describe(annotation)}", value)
        return value

    return read


def _as_they_are(annotation: Any, strict: bool) -> set[Any]:
    """Return the types whose values are already in their final form, so that arrays of them need no call per item."""
    return {annotation} if annotation in (int, str, bytes, bool, float) and not strict else set()


def _array_of(annotation: Any, strict: bool) -> Reader:
    inner, as_they_are = reader(annotation, strict=strict), _as_they_are(annotation, strict)

    def read(value: Any) -> Any:
        if type(value) is not tuple and type(value) is not list:
            raise Mismatch("expected array", value)
        if set(map(type, value)) <= as_they_are:  # the tokens of a prompt
            return value if type(value) is tuple else tuple(value)
        items: list[Any] = []
        try:
            for item in value:
                items.append(inner(item))  # how far this got is the index in the error
        except Mismatch as mismatch:
            mismatch.path = f"[{len(items)}]{mismatch.path}"
            raise
        return tuple(items)

    return read


def _map_of(annotation: Any, strict: bool) -> Reader:
    inner, as_they_are = reader(annotation, strict=strict), _as_they_are(annotation, strict)

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise Mismatch("expected map", value)
        if set(map(type, value)) <= {str} and set(map(type, value.values())) <= as_they_are:  # a participant's counters
            return value
        key: Any = None
        items = {}
        try:
            for key, item in value.items():
                if type(key) is not str:
                    raise Mismatch("expected a str as key")
                items[key] = inner(item)
        except Mismatch as mismatch:
            mismatch.path = f"[{str(key)[:64]!r}]{mismatch.path}"
            raise
        return items

    return read


def _dataclass(cls: Any, strict: bool) -> Reader:
    plan = [(field.name, field.default is MISSING, reader(kind, strict=strict)) for field, kind in annotated(cls)]
    names = {name for name, _, _ in plan}

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise Mismatch("expected map", value)
        arguments = {}
        name = ""
        try:
            for name, required, check in plan:
                if name in value:
                    arguments[name] = check(value[name])
                elif required:
                    raise Mismatch("missing")
            if strict and (unknown := value.keys() - names):
                name = min(unknown)
                raise Mismatch("unknown field")
        except Mismatch as mismatch:
            mismatch.path = f".{name}{mismatch.path}"
            raise
        try:
            return cls(**arguments)
        except ValueError as error:  # from __post_init__: fields that do not go together
            raise Mismatch(str(error)) from None

    return read
