"""The codec: turns frozen dataclasses into msgpack maps and back, and checks every field against its annotation.

A message is a map that has its type's name under "type". Fields equal to their default are left out, unknown fields are
ignored. protocol/schema.py defines what a field may hold; a message nested in another has no "type". This is the only
module that uses msgpack.

The version of the protocol is not the version of the package. A change that breaks older peers (a field removed or
retyped, a new value in a closed list) raises the major number, which is in the first frame of every message. A new
message, or a new field with a default, raises the minor number, which is in `Hello` and `Welcome`.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import MISSING
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, TypeVar, dataclass_transform, get_args, get_origin

import msgpack
from neuronpipe.protocol.errors import UnknownType, WireError
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.schema import Mismatch, annotated, present, reader

MAJOR = 2
MINOR = 11
VERSION = f"{MAJOR}.{MINOR}"
MAGIC = b"NP%d" % MAJOR

MAX_FRAME_BYTES = 16 << 20
MAX_ARRAY_ITEMS = 1 << 20
MAX_MAP_ITEMS = 1 << 12

T = TypeVar("T")
M = TypeVar("M", bound="Message")


class Message:
    """Base of all messages, and of the dataclasses nested in them. A subclass needs `@message`."""

    __slots__ = ()


@dataclass_transform(frozen_default=True, kw_only_default=True)
def message(cls: type[T]) -> type[T]:
    """Make `cls`, a subclass of `Message`, a frozen dataclass with slots and keyword-only fields."""
    return frozen(kw_only=True, slots=True)(cls)


class Vocabulary:
    """The message classes that are legal in one direction of one link, and their decoder."""

    def __init__(self, *classes: type[Message]) -> None:
        self.classes = classes
        self._by_name: dict[str, Any] = {cls.__name__: cls for cls in classes}

    def __contains__(self, cls: type[Message]) -> bool:
        return cls in self.classes

    def decode(self, frame: bytes | memoryview) -> Message:
        """Return the message in `frame`. Raises UnknownType for a type of another link, WireError for any other
        defect."""
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
    """Return a message as a frame. Raises WireError if a value cannot be encoded or the frame is too large."""
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
    """Return the fields of a message as a map of plain values, without those that equal their default."""
    cls: Any = type(content)
    fields_of: dict[str, Any] = _writer(cls)(content)
    return fields_of


def from_map(cls: type[M], content: Any) -> M:
    """Return the message of class `cls` that the map `content` describes. Raises WireError."""
    kind: Any = cls
    try:
        read: M = reader(kind)(content)
    except Mismatch as mismatch:
        raise WireError(f"{cls.__name__}{mismatch.path}: {mismatch.problem}") from None
    return read


def _unpack(frame: bytes | memoryview) -> Any:
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"frame of {len(frame)} bytes, more than {MAX_FRAME_BYTES}")
    try:
        return msgpack.unpackb(frame, use_list=False, max_array_len=MAX_ARRAY_ITEMS, max_map_len=MAX_MAP_ITEMS)
    except (ValueError, TypeError, OverflowError, MemoryError, msgpack.UnpackException) as error:
        raise WireError(f"no msgpack: {error}") from None


@cache
def _writer(cls: type[Message]) -> Callable[[Any], dict[str, Any]]:
    """Return the function that turns a message of class `cls` into a map of plain values."""
    plan = []
    for field, annotation in annotated(cls):
        if field.name == "type":
            raise TypeError(f"{cls.__name__}.type: this name is taken by the wire")
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
    """Return the function that turns a value into types of msgpack; None if the value already has one."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _lowering(arguments[0])
    if isinstance(annotation, type) and issubclass(annotation, Message):
        cls: Any = annotation
        return _writer(cls)
    if origin is types.UnionType:
        return _lowering_inside(present(annotation), lambda lower, value: None if value is None else lower(value))
    if origin is tuple:
        return _lowering_inside(arguments[0], lambda lower, value: [lower(item) for item in value])
    if origin is dict:
        return _lowering_inside(arguments[1], lambda lower, value: {key: lower(item) for key, item in value.items()})
    return None


def _lowering_inside(annotation: Any, apply: Callable[[Callable[[Any], Any], Any], Any]) -> Callable[[Any], Any] | None:
    lower = _lowering(annotation)
    return None if lower is None else lambda value: apply(lower, value)
