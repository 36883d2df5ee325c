"""Reads the header of a GGUF file: metadata, and the position of each tensor.

GGUF is little-endian: magic, version, number of tensors and of metadata entries; the metadata (key, type, value); the
tensors (name, dimensions with the fastest first, type, offset); padding; the tensors' bytes. Counts are compared with
the remaining bytes before memory is allocated, so that damaged or hostile files cannot exhaust it.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import UserError, quoted, safe_name
from neuronpipe.protocol.frozen import frozen

MAGIC, POWERINFER_MAGIC = b"GGUF", b"PWRI"
VERSIONS = (2, 3)
MAX_METADATA, MAX_TENSORS, MAX_DIMENSIONS, MAX_DEPTH = 1 << 16, 1 << 16, 4, 2
MAX_HEADER_BYTES = 128 << 20  # enough for a vocabulary of a million tokens with its merges
MAX_ITEMS = 1 << 22  # in all lists together: a byte of the file takes up to sixty in memory
DEFAULT_ALIGNMENT_BYTES = 32
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@frozen(slots=True)
class GgufTensor:
    """A tensor: shape with rows first, ggml's name of its encoding, and the range [start, stop) of its bytes in the
    file."""

    shape: tuple[int, ...]
    encoding: str
    start: int
    stop: int


@frozen(slots=True)
class GgufHeader:
    """Metadata by key, and tensors by name.

    powerinfer: the magic is PowerInfer's; see powerinfer.py
    """

    metadata: Record
    tensors: dict[str, GgufTensor]
    powerinfer: bool


def parse_gguf_header(file: BinaryIO, path: Path) -> GgufHeader:
    """Return the header of an open file. Raises UserError, which names `path` and the field, if it is damaged."""
    try:
        return _Reader(path, file).header()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


class _Reader:
    """Reads the header's values in order. `_what` is the name of the current value in errors."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._size_bytes = file.seek(0, 2)
        file.seek(0)
        self._left_bytes, self._what = self._size_bytes, "magic"
        self._items = 0

    def _fail(self, problem: str) -> NoReturn:
        raise UserError(f"{self._path}: {safe_name(self._what)}: {problem}")

    def _take(self, count_bytes: int) -> bytes:
        if count_bytes > self._left_bytes:
            self._fail(f"needs {count_bytes} bytes where the file has {self._left_bytes} left: truncated or damaged")
        self._left_bytes -= count_bytes
        if self._size_bytes - self._left_bytes > MAX_HEADER_BYTES:
            self._fail(f"the header is longer than {MAX_HEADER_BYTES} bytes: damaged")
        return self._file.read(count_bytes)

    def _numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(f"<{code}")))

    def _count(self, code: str, maximum: int) -> int:
        value = int(self._numbers(code)[0])
        if value > maximum:
            self._fail(f"{value} is more than the {maximum} a model may have: damaged")
        return value

    def _string(self) -> str:
        data = self._take(int(self._numbers("Q")[0]))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            self._fail("is not UTF-8 text: damaged")

    def header(self) -> GgufHeader:
        powerinfer = self._read_magic() == POWERINFER_MAGIC
        self._what = "number of tensors"
        tensor_count = self._count("Q", MAX_TENSORS)
        self._what = "number of metadata entries"
        values: dict[str, Any] = {}
        for number in range(self._count("Q", MAX_METADATA)):
            self._what = f"metadata entry {number}"
            key = self._what = self._string()
            if key in values:
                self._fail("the key appears twice: damaged")
            values[key] = self._value(self._numbers("I")[0], 0)
        metadata = Record(values, str(self._path))
        return GgufHeader(metadata, self._tensors(tensor_count, metadata), powerinfer)

    def _read_magic(self) -> bytes:
        magic = self._take(4)
        if magic not in (MAGIC, POWERINFER_MAGIC):
            self._fail("is not GGUF; expected a GGUF file or a Hugging Face directory")
        self._what = "version"
        version = self._numbers("I")[0]
        if int.from_bytes(version.to_bytes(4, "big"), "little") in VERSIONS:
            self._fail(
                "the file is big-endian, as for s390x; only little-endian files are supported; look for one, or "
                "convert it with `gguf-convert-endian FILE little`"
            )
        if version not in VERSIONS:
            self._fail(f"{version} is not supported; {' and '.join(map(str, VERSIONS))} are")
        return magic

    def _value(self, kind: int, depth: int) -> Any:
        if kind in SCALARS:
            return self._numbers(SCALARS[kind])[0]
        if kind == STRING:
            return self._string()
        if kind != ARRAY or depth >= MAX_DEPTH:
            self._fail(f"has value type {kind} at depth {depth}: damaged")
        item, count = self._numbers("IQ")
        if count > self._left_bytes // (struct.calcsize(SCALARS[item]) if item in SCALARS else 8):
            self._fail(f"announces {count} items in {self._left_bytes} bytes: truncated or damaged")
        self._items += count
        if self._items > MAX_ITEMS:
            self._fail(f"has more than the {MAX_ITEMS} values that the lists of a file may have: damaged")
        if item in SCALARS:
            return list(self._numbers(SCALARS[item], count))
        return [self._value(item, depth + 1) for _ in range(count)]

    def _tensors(self, count: int, metadata: Record) -> dict[str, GgufTensor]:
        alignment = DEFAULT_ALIGNMENT_BYTES
        if metadata.has("general.alignment"):
            alignment = metadata.integer("general.alignment", 1, 1 << 20)
        described: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for number in range(count):
            self._what = f"tensor {number}"
            name = self._what = self._string()
            if name in described:
                self._fail("the tensor appears twice: damaged")
            dimensions = self._numbers("Q", self._count("I", MAX_DIMENSIONS))
            described[name] = (dimensions[::-1], *self._numbers("IQ"))
        read_bytes = self._size_bytes - self._left_bytes
        start = read_bytes + -read_bytes % alignment
        tensors = {name: self._tensor(name, start, *fields) for name, fields in described.items()}
        end, before = start, "the header"
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
            self._what = name
            if tensor.start < end:
                self._fail(f"overlaps {safe_name(before)}: damaged")
            end, before = tensor.stop, name
        return tensors

    def _tensor(self, name: str, data_start: int, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        self._what = name
        try:
            encoding = GGMLQuantizationType(kind)
        except ValueError:
            self._fail(f"has type {kind}, which is unknown")
        block_weights, block_bytes = GGML_QUANT_SIZES[encoding]
        weights = math.prod(shape)
        if not shape or not weights or shape[-1] % block_weights:
            self._fail(f"has shape {quoted(list(shape))}, which {encoding.name} cannot store: damaged")
        stop = data_start + offset + weights // block_weights * block_bytes
        if stop > self._size_bytes:
            self._fail(f"ends at byte {stop} of a file of {self._size_bytes}: truncated or damaged")
        return GgufTensor(shape, encoding.name, data_start + offset, stop)


def uniform_integer(metadata: Record, field: str, minimum: int, maximum: int) -> int:
    """Return a whole number, or the number that a list repeats for every layer. Raises UserError if they differ."""
    value = metadata.value(field)
    if isinstance(value, list):
        if len(set(map(repr, value))) != 1:
            metadata.fail(field, "differs between layers: not supported")
        return Record({field: value[0]}, metadata.where).integer(field, minimum, maximum)
    return metadata.integer(field, minimum, maximum)
