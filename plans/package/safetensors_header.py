"""The header of a safetensors file: reading, with checks against damaged and hostile files, and building.

A safetensors file is 8 bytes of little-endian header length, a JSON header, and the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from neuronpipe.plans.strict_json import Record, open_file, parse_json
from neuronpipe.plans.uncached_read import forget
from neuronpipe.protocol.errors import UserError, quoted, safe_name
from neuronpipe.protocol.frozen import frozen

MAX_HEADER_BYTES = 64 << 20
MAX_TENSORS = 1 << 17  # of one file; the largest mixtures have this many in all their files together
MAX_TENSOR_BYTES = 1 << 60
MAX_DIMENSIONS = 8
DATA_ALIGNMENT_BYTES = 64
_FIELDS = {"dtype", "shape", "data_offsets"}
DTYPE_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}


@frozen(slots=True)
class TensorEntry:
    """A tensor of a file: element type, shape, and the range [start, stop) of its bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one of the rows, of which the first dimension has the number."""
        return (self.stop - self.start) // self.shape[0]


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a file by name. Raises UserError as `parse_header`, or if the file cannot be opened."""
    with open_file(path) as file:
        entries = parse_header(file, path)
        forget(file.fileno())
    return entries


def parse_header(file: BinaryIO, path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of an open file by name. Raises UserError, naming `path`, if the header contradicts itself or
    the file's size."""
    try:
        size_bytes = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if size_bytes < 8 or length > min(size_bytes - 8, MAX_HEADER_BYTES):
            raise UserError(
                f"{path}: header length {length} does not fit a file of {size_bytes} bytes: damaged or truncated"
            )
        header = parse_json(file.read(length), f"{path}: header")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if (count := len(header.names())) > MAX_TENSORS:
        raise UserError(f"{path}: header: {count} tensors are more than the {MAX_TENSORS} a file may have: damaged")
    names = [name for name in header.names() if name != "__metadata__"]
    entries = {
        name: _plain_entry(header.value(name), 8 + length) or _entry(header.record(name), 8 + length) for name in names
    }
    _check_coverage(entries, 8 + length, size_bytes, path)
    return entries


def _plain_entry(values: object, data_start: int) -> TensorEntry | None:
    """Return the same entry as `_entry`, in a fifth of the time; None if the values may be wrong, so that `_entry`
    raises the error."""
    if not (isinstance(values, dict) and values.keys() == _FIELDS):
        return None
    dtype, shape, offsets = values["dtype"], values["shape"], values["data_offsets"]
    if not (type(dtype) is str and dtype in DTYPE_BYTES and type(shape) is type(offsets) is list):
        return None
    if len(offsets) != 2 or len(shape) > MAX_DIMENSIONS or not set(map(type, (*shape, *offsets))) <= {int}:
        return None
    start, stop = offsets
    if not 0 <= start <= stop < MAX_TENSOR_BYTES or min(shape, default=0) < 0:
        return None
    if stop - start != math.prod(shape) * DTYPE_BYTES[dtype]:
        return None
    return TensorEntry(dtype, tuple(shape), data_start + start, data_start + stop)


def _entry(record: Record, data_start: int) -> TensorEntry:
    dtype = record.choice("dtype", *DTYPE_BYTES)
    shape = record.items("shape")
    offsets = record.items("data_offsets")
    record.finish()
    for name, values in (("shape", shape), ("data_offsets", offsets)):
        if not all(type(value) is int and 0 <= value < MAX_TENSOR_BYTES for value in values):
            record.fail(name, "expected whole numbers")
    if (
        len(offsets) != 2
        or len(shape) > MAX_DIMENSIONS
        or offsets[1] - offsets[0] != math.prod(shape) * DTYPE_BYTES[dtype]
    ):
        record.fail("data_offsets", f"{quoted(offsets)} do not hold {dtype} of shape {quoted(shape)}")
    return TensorEntry(dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _check_coverage(entries: Mapping[str, TensorEntry], data_start: int, size_bytes: int, path: Path) -> None:
    """Raise UserError if tensors overlap, leave gaps, or do not end with the file."""
    end = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise UserError(
                f"{path}: {safe_name(name)}: data_offsets overlap another tensor or leave a gap: damaged header"
            )
        end = entry.stop
    if end != size_bytes:
        raise UserError(f"{path}: {size_bytes} bytes, but its header describes {end}: truncated or damaged")


def build_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, TensorEntry]]:
    """Return header and entries of a file with the given tensors in that order. The first is aligned to 64 bytes.

    tensors: name -> (safetensors dtype, shape)
    """
    described, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        stop = offset + math.prod(shape) * DTYPE_BYTES[dtype]
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT_BYTES)
    start = 8 + len(text)
    entries = {}
    for name, (dtype, shape) in tensors.items():
        stop = start + math.prod(shape) * DTYPE_BYTES[dtype]
        entries[name] = TensorEntry(dtype, tuple(shape), start, stop)
        start = stop
    return len(text).to_bytes(8, "little") + text, entries


def file_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
    _, entries = build_header(tensors)
    return max(entry.stop for entry in entries.values())
