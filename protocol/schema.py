"""Checks of plain values, parsed from a file or a message, against the annotations of a dataclass.

The annotation of each field is turned into a function once per class:

    int, float, str, bytes, bool   that type and no other; an int is accepted as a float, a bool never as an int
    T | None                       null or T
    Literal[...]                   one of the values
    tuple[T, ...]                  array of T
    dict[str, T]                   map
    Annotated[T, ...]              T, with the marks of protocol/marks.py
    a dataclass                    map of its fields; its __post_init__ raises ValueError for contradictory fields, or
                                   FieldError, which names one

Messages are read leniently: a newer peer may send fields that are not known here, and the receiver checks ranges. Files
are read strictly: unknown and repeated fields, numbers out of their range, that are not finite or need more than 64
bits, and text with control characters are refused. `to_json` writes what `from_json` reads.

plans/strict_json.py reads formats of other programs field by field, with the same checks.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from neuronpipe.protocol.errors import UserError, quoted, safe_name
from neuronpipe.protocol.marks import Range, Required, mark_of

T = TypeVar("T")
Reader = Callable[[Any], Any]
_NOTHING = object()
_UNIONS = (types.UnionType, Union)  # Python turns `Literal[...] | None` into the second


class Mismatch(Exception):
    """A value that does not fit its annotation. Each level prepends its part of the path to the value."""

    def __init__(self, problem: str, value: object = _NOTHING) -> None:
        self.problem, self.value = problem, value
        self.path = ""

    def complaint(self) -> str:
        """Return the problem and the value, as errors about files state them."""
        return self.problem if self.value is _NOTHING else f"{self.problem}, found {quoted(self.value)}"


class FieldError(ValueError):
    """A dataclass whose field `field` contradicts another or is out of range. `complaint` says how."""

    def __init__(self, field: str, complaint: str) -> None:
        super().__init__(f"{field}: {complaint}")
        self.field, self.complaint = field, complaint


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
        place = f"{where}: field '{safe_name(mismatch.path[1:])}'" if mismatch.path else where
        raise UserError(f"{place}: {mismatch.complaint()}") from None
    return read


def to_json(instance: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as `from_json` reads them, with lists for tuples. Those that have their defaults
    are left out unless they are marked REQUIRED, so that a field which is added later changes no older file."""
    values = [(name, getattr(instance, name), default) for name, default in _written_fields(instance.__class__)]
    return {name: _plain(value) for name, value, default in values if default is MISSING or value != default}


@cache
def _written_fields(cls: Any) -> list[tuple[str, Any]]:
    """Return each field's name and the value with which it is left out; MISSING: it never is."""
    return [(field.name, MISSING if mark_of(kind, Required) else _default_of(field)) for field, kind in annotated(cls)]


def _default_of(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return to_json(value) if is_dataclass(value) else value


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
    """Return the fields of a dataclass and their annotations, marks included. In a generic one, such as
    `Cached[Speed]`, type parameters are replaced by their arguments."""
    plain = get_origin(cls) or cls
    arguments = dict(zip(getattr(plain, "__parameters__", ()), get_args(cls), strict=True))
    hints = get_type_hints(plain, include_extras=True)
    return ((field, arguments.get(hints[field.name], hints[field.name])) for field in fields(plain))


@cache
def reader(annotation: Any, *, strict: bool = False) -> Reader:
    """Return the function that checks a value against `annotation` and returns it in its final form: arrays as tuples,
    maps as dataclasses. It raises Mismatch."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        allowed = mark_of(annotation, Range) if strict else None
        if allowed is None:
            return reader(arguments[0], strict=strict)
        return _text_within(allowed) if arguments[0] is str else number_within(arguments[0], allowed)
    if annotation is float:
        return _finite if strict else _float
    if strict and annotation in _STRICT:
        return _STRICT[annotation]
    if annotation in (int, str, bytes, bool):
        return _exactly(annotation)
    if origin is Literal:
        return one_of(arguments) if strict else _one_of(annotation)
    if origin in _UNIONS:
        inner = reader(present(annotation), strict=strict)
        return lambda value: None if value is None else inner(value)
    if origin is tuple and arguments[1:] == (...,):
        return _array_of(arguments[0], strict)
    if origin in (dict, Mapping) and arguments[0] is str:
        return _map_of(arguments[1], strict)
    if is_dataclass(origin or annotation):
        return _dataclass(annotation, strict)
    raise TypeError(f"{annotation}: no type of a field")


def number_within(kind: type, allowed: Range) -> Reader:
    """Return a strict reader of numbers in a range. kind: int or float."""
    plain = whole_number if kind is int else _finite

    def read(value: Any) -> Any:
        if (number := plain(value)) not in allowed:
            limits = f"not {allowed}" if allowed.exclusive else f"outside {allowed.minimum}..{allowed.maximum}"
            raise Mismatch(f"{quoted(value)} is {limits}")
        return number

    return read


def _text_within(allowed: Range) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not str or not value.isprintable() or len(value) not in allowed:
            raise Mismatch(f"expected at most {allowed.maximum} printable characters", value)
        return value

    return read


def one_of(choices: Collection[Any]) -> Reader:
    """Return a strict reader of one of some values."""
    values = _typed(choices)

    def read(value: Any) -> Any:
        if type(value).__hash__ is None or (type(value), value) not in values:
            raise Mismatch(f"{quoted(value)} is not one of {', '.join(map(str, choices))}")
        return value

    return read


def whole_number(value: Any) -> int:
    """Return a whole number of any size; a bool is none."""
    if type(value) is not int:
        raise Mismatch("expected a whole number", value)
    return value


def true_or_false(value: Any) -> bool:
    """Return a value that is true or false; numbers are not accepted."""
    if type(value) is not bool:
        raise Mismatch("expected true or false", value)
    return value


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
    if type(value) not in (int, float):
        raise Mismatch("expected a number", value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):  # 1e999 reads as infinity
        raise Mismatch("expected a finite number", value)
    return number


def _int_of_64_bits(value: Any) -> int:
    if not -(1 << 63) <= whole_number(value) < 1 << 63:
        raise Mismatch("expected a whole number of 64 bits", value)
    return int(value)


def _printable(value: Any) -> str:
    if type(value) is not str or not value.isprintable():  # it may be printed, and control characters act on a terminal
        raise Mismatch("expected printable text", value)
    return value


_STRICT: dict[Any, Reader] = {int: _int_of_64_bits, str: _printable, bool: true_or_false}


def _typed(values: Collection[Any]) -> set[tuple[type, Any]]:
    # Keyed by type as well: True == 1 and 1.0 == 1 in Python, but not on the wire.
    return {(type(value), value) for value in values}


def _one_of(annotation: Any) -> Reader:
    values = _typed(get_args(annotation))
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
            raise Mismatch("expected a list" if strict else "expected array", value)
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
            raise Mismatch("expected an object" if strict else "expected map", value)
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
    plan = []
    for field, kind in annotated(cls):
        has_no_default = field.default is MISSING and field.default_factory is MISSING
        is_required = has_no_default or (strict and mark_of(kind, Required) is not None)
        plan.append((field.name, is_required, reader(kind, strict=strict)))
    names = {name for name, _, _ in plan}

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise Mismatch("expected an object" if strict else "expected map", value)
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
                raise Mismatch("unknown field; a newer version may understand it")
        except Mismatch as mismatch:
            mismatch.path = f".{name}{mismatch.path}"
            raise
        try:
            return cls(**arguments)
        except FieldError as error:
            contradiction = Mismatch(error.complaint)
            contradiction.path = f".{error.field}"
            raise contradiction from None
        except ValueError as error:  # from __post_init__: fields that do not go together
            raise Mismatch(str(error)) from None

    return read
