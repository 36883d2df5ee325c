"""The codec: frozen dataclasses to msgpack maps and back, every field checked against its annotation.

A message is a map that carries its type's name under "type"; fields equal to their default are left out, unknown
fields are ignored. What a field may hold is read once per class from its annotation and turned into a reader:

    int, float, str, bytes, bool   that type and no other; an int is taken for a float, a bool never for an int
    T | None                       nil or T
    Literal[...]                   one of the values
    tuple[T, ...]                  array of T
    dict[str, T]                   map
    a message class                map of its fields, without "type"

This is the only module that knows msgpack.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from functools import cache
from operator import attrgetter
from typing import Any, Literal, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

import msgpack
from neuronpipe.protocol.errors import UnknownType, WireError

MAX_FRAME_BYTES = 16 << 20
MAX_ARRAY_ITEMS = 1 << 20
MAX_MAP_ITEMS = 1 << 12

T = TypeVar("T")
M = TypeVar("M", bound="Message")
Reader = Callable[[Any], Any]


class Message:
    """Base of everything that travels, and of the maps nested in it; `@message` makes the dataclass."""

    __slots__ = ()


@dataclass_transform(frozen_default=True, kw_only_default=True)
def message(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, keyword-only, slotted dataclass: the one shape that messages have."""
    return dataclass(frozen=True, kw_only=True, slots=True)(cls)


class _Mismatch(Exception):
    """A value that does not fit its annotation; the path grows outwards on its way up."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        self.path = ""


class Vocabulary:
    """The message classes that are legal in one direction of one link; decodes these and nothing else."""

    def __init__(self, *classes: type[Message]) -> None:
        self.classes = classes
        self._by_name: dict[str, Any] = {cls.__name__: cls for cls in classes}

    def __contains__(self, cls: type[Message]) -> bool:
        return cls in self.classes

    def decode(self, frame: bytes | memoryview) -> Message:
        """The message in `frame`. Raises UnknownType for a type of another link, WireError for anything else."""
        content = _unpack(frame)
        if type(content) is not dict:
            raise WireError("expected a map")
        name = content.get("type")
        if type(name) is not str:
            raise WireError("type: expected str")
        cls = self._by_name.get(name)
        if cls is None:
            raise UnknownType(f"{name[:64]!r}: no message of this link")
        decoded: Message = from_map(cls, content)
        return decoded


def encode(content: Message) -> bytes:
    """The frame of one message. Raises WireError when a value cannot be written or the frame is too big."""
    cls: Any = type(content)
    write = _writer(cls)
    try:
        frame = msgpack.packb({"type": cls.__name__, **write(content)})
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"{cls.__name__}: {error}") from error
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"{cls.__name__}: {len(frame)} bytes, more than the {MAX_FRAME_BYTES} of a frame")
    return bytes(frame)


def to_map(content: Message) -> dict[str, Any]:
    """The fields of a message as a map of plain values, defaults left out."""
    cls: Any = type(content)
    fields_of: dict[str, Any] = _writer(cls)(content)
    return fields_of


def from_map(cls: type[M], content: Any) -> M:
    """The message of class `cls` that `content` describes. Raises WireError."""
    kind: Any = cls
    try:
        read: M = _compile(kind)(content)
    except _Mismatch as mismatch:
        raise WireError(f"{cls.__name__}{mismatch.path}: {mismatch.problem}") from None
    return read


def describe(annotation: object) -> str:
    """An annotation in the words of the specification: 'int', 'array of int', '"none" or "last"', ..."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in arguments)
    if origin is tuple:
        return f"array of {describe(arguments[0])}"
    if origin is dict:
        return f"map of {describe(arguments[1])}"
    if origin is types.UnionType:
        return f"{describe(_present(annotation))} or nil"
    return getattr(annotation, "__name__", str(annotation))


def _unpack(frame: bytes | memoryview) -> Any:
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"frame of {len(frame)} bytes, more than {MAX_FRAME_BYTES}")
    try:
        return msgpack.unpackb(frame, use_list=False, max_array_len=MAX_ARRAY_ITEMS, max_map_len=MAX_MAP_ITEMS)
    except (ValueError, TypeError, OverflowError, MemoryError, msgpack.UnpackException) as error:
        raise WireError(f"no msgpack: {error}") from None


def _present(annotation: object) -> object:
    """The T of `T | None`, the only union there is."""
    rest = [part for part in get_args(annotation) if part is not types.NoneType]
    if len(rest) != 1 or len(get_args(annotation)) != 2:
        raise TypeError(f"{annotation}: a message field can be T or T | None, no other union")
    return rest[0]


@cache
def _writer(cls: type[Message]) -> Callable[[Any], dict[str, Any]]:
    """The function that turns a message of class `cls` into a map of plain values."""
    plan = []
    for field, annotation in _annotated(cls):
        default = field.default if field.default is not MISSING else _NOTHING
        plan.append((field.name, attrgetter(field.name), default, _lowering(annotation)))

    def write(content: Any) -> dict[str, Any]:
        written: dict[str, Any] = {}
        for name, get, default, lower in plan:
            value = get(content)
            if value is default or value == default:
                continue
            written[name] = value if lower is None else lower(value)
        return written

    return write


_NOTHING = object()


def _lowering(annotation: Any) -> Callable[[Any], Any] | None:
    """How to turn a value into what msgpack knows; None where it already is."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if _is_message(annotation):
        return _writer(annotation)
    if origin is types.UnionType:
        return _lowering_inside(_present(annotation), lambda lower, value: None if value is None else lower(value))
    if origin is tuple:
        return _lowering_inside(arguments[0], lambda lower, value: [lower(item) for item in value])
    if origin is dict:
        return _lowering_inside(arguments[1], lambda lower, value: {key: lower(item) for key, item in value.items()})
    return None


def _lowering_inside(annotation: Any, apply: Callable[[Reader, Any], Any]) -> Callable[[Any], Any] | None:
    lower = _lowering(annotation)
    return None if lower is None else lambda value: apply(lower, value)


def _annotated(cls: type[Message]) -> Iterable[tuple[Any, Any]]:
    hints = get_type_hints(cls)
    for field in fields(cls):  # type: ignore[arg-type]
        if field.name == "type":
            raise TypeError(f"{cls.__name__}.type: this name is taken by the wire")
        yield field, hints[field.name]


@cache
def _compile(annotation: Any) -> Reader:
    """The function that checks a value against `annotation` and returns it in its final form."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is float:
        return _read_float
    if annotation in (int, str, bytes, bool):
        return _exactly(annotation)
    if origin is Literal:
        return _one_of(annotation)
    if origin is types.UnionType:
        return _optional(_compile(_present(annotation)))
    if origin is tuple and arguments[1:] == (...,):
        return _array_of(arguments[0])
    if origin is dict and arguments[0] is str:
        return _map_of(arguments[1])
    if _is_message(annotation):
        return _message_of(annotation)
    raise TypeError(f"{annotation}: no type of the wire")


def _is_message(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Message)


def _read_float(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value)
    raise _Mismatch("expected float")


def _exactly(kind: type) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise _Mismatch(f"expected {kind.__name__}")
        return value

    return read


def _one_of(annotation: Any) -> Reader:
    # Keyed by type as well: True == 1 and 1.0 == 1 in Python, but not on the wire.
    values = {(type(value), value) for value in get_args(annotation)}
    kinds = {kind for kind, _ in values}

    def read(value: Any) -> Any:
        if type(value) not in kinds or (type(value), value) not in values:
            raise _Mismatch(f"expected {describe(annotation)}")
        return value

    return read


def _optional(inner: Reader) -> Reader:
    return lambda value: None if value is None else inner(value)


def _as_they_are(annotation: Any) -> set[Any]:
    """The types of values that are in their final form: many of them are checked without a call for each."""
    return {annotation} if annotation in (int, str, bytes, bool, float) else set()


def _array_of(annotation: Any) -> Reader:
    inner, as_they_are = _compile(annotation), _as_they_are(annotation)

    def read(value: Any) -> Any:
        if type(value) is not tuple:
            raise _Mismatch("expected array")
        if set(map(type, value)) <= as_they_are:  # the tokens of a prompt
            return value
        items: list[Any] = []
        try:
            for item in value:
                items.append(inner(item))  # how far this got is the index in the error
        except _Mismatch as mismatch:
            mismatch.path = f"[{len(items)}]{mismatch.path}"
            raise
        return tuple(items)

    return read


def _map_of(annotation: Any) -> Reader:
    inner, as_they_are = _compile(annotation), _as_they_are(annotation)

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise _Mismatch("expected map")
        if set(map(type, value)) <= {str} and set(map(type, value.values())) <= as_they_are:  # a participant's counters
            return value
        key: Any = None
        items = {}
        try:
            for key, item in value.items():
                if type(key) is not str:
                    raise _Mismatch("expected a str as key")
                items[key] = inner(item)
        except _Mismatch as mismatch:
            mismatch.path = f"[{str(key)[:64]!r}]{mismatch.path}"
            raise
        return items

    return read


def _message_of(cls: type[Message]) -> Reader:
    plan = []
    for field, annotation in _annotated(cls):
        required = field.default is MISSING
        plan.append((field.name, required, _compile(annotation)))

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise _Mismatch("expected map")
        arguments = {}
        name = ""
        try:
            for name, required, check in plan:
                if name in value:
                    arguments[name] = check(value[name])
                elif required:
                    raise _Mismatch("missing")
        except _Mismatch as mismatch:
            mismatch.path = f".{name}{mismatch.path}"
            raise
        try:
            return cls(**arguments)
        except ValueError as error:  # from __post_init__: fields that do not go together
            raise _Mismatch(str(error)) from None

    return read
