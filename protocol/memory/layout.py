"""The layout of a shared segment: where each of its arrays lies.

A layout is a list of fields. Each is an array that starts at a multiple of 64 bytes, after the header page. A field
names the processes that write it and read it, and what orders the write before the read; SPEC.md prints this table. The
layouts themselves are in `layouts/`.
"""

from __future__ import annotations

import math
import re
import zlib
from dataclasses import dataclass, field

from neuronpipe.protocol.frozen import frozen

PAGE_BYTES = 4096
LINE_BYTES = 64
LINE_WORDS = LINE_BYTES // 4
_LINE = re.compile(r"([a-z_]+) (u8|u16|u32|u64|f32) (\d{1,15}(?:x\d{1,15}){0,7}) (\d{1,15})")
TYPE_BYTES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "f32": 4}


@frozen(kw_only=True, slots=True)
class Field:
    """One array, little-endian. `dimensions` names the lengths in `shape`; the last dimension is contiguous."""

    name: str
    type: str
    dimensions: tuple[str, ...]
    shape: tuple[int, ...]
    offset_bytes: int
    total_bytes: int
    written_by: str
    read_by: str
    ordering: str


@frozen(kw_only=True, slots=True)
class Layout:
    """All fields of one segment. `kind` identifies the kind of segment in its header."""

    name: str
    kind: int
    fields: tuple[Field, ...]
    total_bytes: int

    @classmethod
    def parse(cls, name: str, kind: int, text: str, total_bytes: int) -> Layout:
        """Parse the `text` of a layout; its fields have no writers, readers and orderings. Raises ValueError if it is
        none, if fields overlap, or if one does not lie within `total_bytes`."""
        fields, end_bytes = [], PAGE_BYTES
        for line in text.splitlines():
            match = _LINE.fullmatch(line)
            if match is None:
                raise ValueError(f"{line[:80]!r} is no field: expected a name, a type, lengths and an offset")
            shape, offset_bytes = tuple(int(length) for length in match[3].split("x")), int(match[4])
            size_bytes = TYPE_BYTES[match[2]] * math.prod(shape)
            if offset_bytes % LINE_BYTES or offset_bytes < end_bytes or offset_bytes + size_bytes > total_bytes:
                raise ValueError(f"{match[1]} does not lie between its neighbours")
            end_bytes = offset_bytes + size_bytes
            fields.append(
                Field(
                    name=match[1],
                    type=match[2],
                    dimensions=tuple(str(length) for length in shape),
                    shape=shape,
                    offset_bytes=offset_bytes,
                    total_bytes=size_bytes,
                    written_by="",
                    read_by="",
                    ordering="",
                )
            )
        return cls(name=name, kind=kind, fields=tuple(fields), total_bytes=total_bytes)

    def __getitem__(self, name: str) -> Field:
        for candidate in self.fields:
            if candidate.name == name:
                return candidate
        raise KeyError(f"{self.name}: no field {name}")

    @property
    def fingerprint(self) -> int:
        """CRC-32 of `text`, equal in two processes that computed the same layout."""
        return zlib.crc32(self.text.encode())

    @property
    def text(self) -> str:
        """One line for each field, in order: name, type, shape, offset."""
        return "".join(
            f"{field.name} {field.type} {'x'.join(str(length) for length in field.shape)} {field.offset_bytes}\n"
            for field in self.fields
        )


@dataclass(slots=True)
class Fields:
    """A layout under construction.

    lengths: the dimensions that `add` refers to by name
    """

    name: str
    kind: int
    lengths: dict[str, int]
    _fields: list[Field] = field(default_factory=list)
    _end_bytes: int = PAGE_BYTES

    def add(self, name: str, type: str, *dimensions: str | int, by: str, to: str, ordering: str) -> None:
        """Place the next field on the next cache line. by, to: the processes that write and read it. Raises
        ValueError."""
        shape = tuple(length if isinstance(length, int) else self.lengths[length] for length in dimensions)
        if min(shape) < 0:
            raise ValueError(f"{self.name}.{name}: shape {shape} is negative")
        if any(field.name == name for field in self._fields):
            raise ValueError(f"{self.name}.{name}: laid out twice")
        offset_bytes = -(-self._end_bytes // LINE_BYTES) * LINE_BYTES
        total_bytes = TYPE_BYTES[type]
        for length in shape:
            total_bytes *= length
        self._fields.append(
            Field(
                name=name,
                type=type,
                dimensions=tuple(str(dimension) for dimension in dimensions),
                shape=shape,
                offset_bytes=offset_bytes,
                total_bytes=total_bytes,
                written_by=by,
                read_by=to,
                ordering=ordering,
            )
        )
        self._end_bytes = offset_bytes + total_bytes

    def layout(self) -> Layout:
        """Return the finished layout, a whole number of pages long."""
        total_bytes = -(-self._end_bytes // PAGE_BYTES) * PAGE_BYTES
        return Layout(name=self.name, kind=self.kind, fields=tuple(self._fields), total_bytes=total_bytes)
