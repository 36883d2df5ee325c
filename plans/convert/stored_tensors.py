"""The tensors of a model's source files: rows of weights that are read on demand, and the inventory of all tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from pathlib import Path

import numpy as np
from neuronpipe.plans.convert.encodings import (
    BLOCK_WEIGHTS_BYTES,
    BYTES,
    ENCODINGS,
    PLAIN_BYTES,
    decode_stored,
    row_bytes,
)
from neuronpipe.plans.convert.source_file import SourceFile
from neuronpipe.protocol.errors import UserError, quoted, safe_name
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

RowNumbers = NDArray[np.int64]
MAX_TENSORS = 1 << 18  # in all files of a model together
MAX_SPAN = 4  # stored rows that are read for each row that is needed


@frozen
class StoredMatrix:
    """Rows of one encoding at equal distances in a file. A vector is a matrix of one row, or after `as_column` of one
    column.

    order: row r is the stored row order[r], or zeros if that is negative; None: as stored
    offset_added: added to every element by `vector`
    factor: multiplied with every element by `vector`
    """

    name: str
    file: SourceFile
    offset: int
    rows: int
    columns: int
    encoding: str
    order: RowNumbers | None = None
    offset_added: float = 0.0
    factor: float = 1.0

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """All files that the rows are read from."""
        return (self.file,)

    def reordered(self, order: RowNumbers | None) -> StoredMatrix:
        return replace(self, order=order)

    def selected(self, rows: RowNumbers) -> StoredMatrix:
        """Return a matrix of some stored rows."""
        return replace(self, rows=len(rows), order=rows)

    def instead(self, length: int, value: float) -> StoredMatrix:
        """Return a vector of equal elements, which the source does not have. Errors name this tensor."""
        absent = np.full(length, -1, dtype=np.int64)
        return StoredMatrix(self.name, self.file, self.offset, length, 1, "F32", order=absent, offset_added=value)

    def rows_from(self, first: int, count: int) -> StoredMatrix:
        """Return a matrix of `count` stored rows, from row `first` on. Raises UserError if there are fewer."""
        if first + count > self.rows:
            raise UserError(f"{self.file.path}: {self.name}: {self.rows} rows, but {first + count} are needed")
        if self.order is not None:
            return replace(self, rows=count, order=self.order[first : first + count])
        if type(self) is not StoredMatrix:
            return replace(self, rows=count, order=np.arange(first, first + count, dtype=np.int64))
        return replace(self, rows=count, offset=self.offset + first * self.stride_bytes)

    @property
    def stride_bytes(self) -> int:
        return row_bytes(self.encoding, self.columns) or 0

    def as_column(self) -> StoredMatrix:
        """Return a vector as a matrix of one column, so that its elements can be reordered. Raises UserError if it is
        quantized."""
        if self.encoding not in PLAIN_BYTES:
            raise UserError(f"{self.file.path}: {self.name}: {self.encoding} is not supported for a bias")
        return replace(self, rows=self.columns, columns=1)

    def stored(self, rows: RowNumbers) -> NDArray[np.uint8]:
        """Return the bytes of some rows: [len(rows), row bytes]. Raises UserError if they cannot be read."""
        stride = self.stride_bytes
        places = rows if self.order is None else self.order[rows]
        if len(places) and (absent := places < 0).any():
            padded = np.zeros((len(rows), stride), dtype=np.uint8)  # bytes of 0 are weights of 0 in every encoding
            padded[~absent] = replace(self, order=None).stored(places[~absent])
            return padded
        breaks = np.flatnonzero(np.diff(places) != 1) + 1
        if len(breaks):
            first, end = int(places.min()), int(places.max()) + 1
            if end - first <= MAX_SPAN * len(rows):  # one read with some rows too many, instead of a read for each
                span = np.empty((end - first, stride), dtype=np.uint8)
                self.file.read_into(self.offset + first * stride, span)
                return np.ascontiguousarray(span[places - first])
        target = np.empty((len(rows), stride), dtype=np.uint8)
        # Consecutive stored rows are read at once.
        for start, stop in zip((0, *breaks), (*breaks, len(rows)), strict=True):
            if start < stop:
                self.file.read_into(self.offset + int(places[start]) * stride, target[start:stop])
        return target

    def values(self, rows: RowNumbers) -> NDArray[np.float32]:
        """Return some rows, [len(rows), columns]. Raises UserError if they cannot be read or are not finite."""
        return self.checked(decode_stored(self.encoding, self.stored(rows)))

    def checked(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return `values`, which were decoded from this tensor. Raises UserError if one is NaN or infinite."""
        if not np.isfinite(values).all():
            raise UserError(f"{self.file.path}: {self.name}: holds values that are not finite: damaged")
        return values

    def plus(self, offset: float) -> StoredMatrix:
        return replace(self, offset_added=offset)

    def times(self, factor: float) -> StoredMatrix:
        return replace(self, factor=factor)

    def vector(self) -> NDArray[np.float32]:
        """Return all values in one dimension, times `factor`, plus `offset_added`."""
        values = self.values(np.arange(self.rows, dtype=np.int64)).reshape(-1)
        values = values * np.float32(self.factor) if self.factor != 1 else values
        return values + np.float32(self.offset_added) if self.offset_added else values

    def row_part(self, first: int, count: int) -> StoredMatrix:
        """Return a matrix of `count` stored rows, from row `first` on. Rows that do not exist are zeros."""
        places = np.arange(first, first + count, dtype=np.int64)
        if self.order is None:
            return replace(self, rows=count, order=np.where(places < self.rows, places, -1))
        present = self.order[first : first + count]
        return replace(self, rows=count, order=np.pad(present, (0, count - len(present)), constant_values=-1))

    def turned(self) -> TurnedMatrix:
        """Return the matrix whose rows are the columns of this one."""
        return TurnedMatrix(self.name, self.file, self.offset, self.columns, self.rows, "F32", whole=self)

    def columns_reordered(self, order: RowNumbers) -> ReorderedColumns:
        """Return the matrix whose column c is the column order[c] of this one."""
        weights = 1 if self.encoding in PLAIN_BYTES else BLOCK_WEIGHTS_BYTES[self.encoding][0]
        blocks = order.reshape(-1, weights) if len(order) % weights == 0 else order[:, None]
        has_whole_blocks = blocks.shape[1] == weights and bool(
            (blocks[:, 0] % weights == 0).all() and (np.diff(blocks) == 1).all()
        )
        return ReorderedColumns(
            self.name, self.file, self.offset, self.rows, self.columns, self.encoding if has_whole_blocks else "F32",
            whole=self, column_order=order,
        )  # fmt: skip

    def column_part(self, first: int, count: int) -> ColumnPart:
        """Return a matrix of `count` columns, from column `first` on. Columns that do not exist are zeros."""
        has_whole_blocks = all(row_bytes(self.encoding, columns) is not None for columns in (first, count))
        encoding = self.encoding if has_whole_blocks else "F32"
        return ColumnPart(self.name, self.file, self.offset, self.rows, count, encoding, whole=self, first_column=first)


@frozen
class ColumnPart(StoredMatrix):
    """Some columns of a matrix. Columns that do not exist are zeros. Every read is of whole rows. The part has the
    encoding of the matrix if its blocks stay whole, otherwise it is decoded."""

    whole: StoredMatrix = field(kw_only=True)
    first_column: int = field(kw_only=True)

    @property
    def stride_bytes(self) -> int:
        return self.whole.stride_bytes

    @property
    def is_decoded(self) -> bool:
        """True if blocks of the matrix cross the bounds of the part."""
        return self.encoding != self.whole.encoding

    def stored(self, rows: RowNumbers) -> NDArray[np.uint8]:
        if self.is_decoded:
            return np.ascontiguousarray(self.values(rows)).view(np.uint8)
        first_byte, size_bytes = (row_bytes(self.encoding, count) or 0 for count in (self.first_column, self.columns))
        part = self.whole.stored(rows)[:, first_byte : first_byte + size_bytes]
        return np.pad(part, ((0, 0), (0, size_bytes - part.shape[1])))

    def values(self, rows: RowNumbers) -> NDArray[np.float32]:
        part = self.whole.values(rows)[:, self.first_column : self.first_column + self.columns]
        return np.pad(part, ((0, 0), (0, self.columns - part.shape[1])))


@frozen
class TurnedMatrix(StoredMatrix):
    """A matrix whose rows are the columns of another one. Reading rows reads all of that one, which is small."""

    whole: StoredMatrix = field(kw_only=True)

    def stored(self, rows: RowNumbers) -> NDArray[np.uint8]:
        columns = self.whole.values(np.arange(self.whole.rows, dtype=np.int64)).T[rows]
        return np.ascontiguousarray(columns).view(np.uint8)


@frozen
class ReorderedColumns(StoredMatrix):
    """A matrix whose columns are those of another one in another order. Rows have the encoding of that one if its
    blocks stay whole, otherwise they are decoded."""

    whole: StoredMatrix = field(kw_only=True)
    column_order: RowNumbers = field(kw_only=True)

    def stored(self, rows: RowNumbers) -> NDArray[np.uint8]:
        if self.encoding != self.whole.encoding:
            return np.ascontiguousarray(self.whole.values(rows)[:, self.column_order]).view(np.uint8)
        plain = PLAIN_BYTES.get(self.encoding)
        weights, size_bytes = (1, plain) if plain else BLOCK_WEIGHTS_BYTES[self.encoding]
        blocks = self.whole.stored(rows).reshape(len(rows), -1, size_bytes)
        return blocks[:, self.column_order[::weights] // weights].reshape(len(rows), -1)


WHOLE_MODEL = ("model", "language_model")  # words before the name of a part
OUTPUTS = ("lm_head", "output")  # left out if the embedding is also the output
MAX_NAMED_PARTS = 4

OpenFile = Callable[[Path], SourceFile]
"""Opens a file of weights: `SourceFile` for files on this disk, or a function for files that are downloaded."""


class Inventory:
    """The tensors of a source by name. It records which are used, so that tensors are not ignored silently.

    readers: encoding -> function of the inventory, a name and a shape that takes a tensor with this encoding
    """

    def __init__(self, where: Path, readers: Mapping[str, Callable[..., StoredMatrix]] | None = None) -> None:
        self._where, self._readers = where, readers or {}
        self._tensors: dict[str, tuple[SourceFile, int, tuple[int, ...], str]] = {}
        self._used: set[str] = set()

    def add(self, name: str, file: SourceFile, offset: int, shape: tuple[int, ...], encoding: str) -> None:
        """Add a tensor. Raises UserError if the name is there already, or for too many tensors.

        shape: rows first
        """
        if name in self._tensors or len(self._tensors) == MAX_TENSORS:
            problem = "the tensor appears twice" if name in self._tensors else f"more than {MAX_TENSORS} tensors"
            raise UserError(f"{file.path}: {safe_name(name)}: {problem}")
        self._tensors[name] = (file, offset, shape, encoding)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def leave(self, name: str) -> None:
        """Mark a tensor as used, although the package does not need it."""
        self._used.add(name)

    def file(self, name: str) -> Path:
        return self._tensors[name][0].path

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, rows first. Raises UserError if there is no such tensor."""
        if name not in self._tensors:
            raise UserError(f"{self._where}: {safe_name(name)}: the tensor is missing")
        return self._tensors[name][2]

    def take(self, name: str, *shape: int) -> StoredMatrix:
        """Return a tensor and mark it as used. Raises UserError if it is missing, has another shape, or an encoding
        that is not supported."""
        if (actual := self.shape(name)) != shape:
            raise UserError(
                f"{self._where}: {safe_name(name)}: has shape {quoted(list(actual))}, "
                f"but the configuration needs {list(shape)}"
            )
        file, offset, _, encoding = self._tensors[name]
        if encoding in self._readers:
            return self._readers[encoding](self, name, *shape)
        if encoding not in ENCODINGS or row_bytes(encoding, shape[-1]) is None:
            raise UserError(f"{file.path}: {safe_name(name)}: {encoding} is not supported; {', '.join(ENCODINGS)} are")
        self._used.add(name)
        return StoredMatrix(name, file, offset, shape[0] if len(shape) > 1 else 1, shape[-1], encoding)

    def encoding(self, name: str) -> str:
        return self._tensors[name][3]

    def take_place(self, name: str) -> tuple[SourceFile, int]:
        """Return the file and the offset of a tensor and mark it as used."""
        self._used.add(name)
        return self._tensors[name][:2]

    def take_bytes(self, name: str, *shape: int) -> tuple[SourceFile, int]:
        """Return the file and the offset of a tensor of bytes and mark it as used. Raises UserError as `take`."""
        actual, (file, offset, _, encoding) = self.shape(name), self._tensors[name]
        if (actual, encoding) != (shape, BYTES):
            raise UserError(
                f"{file.path}: {safe_name(name)}: is {encoding} with shape {quoted(list(actual))}, "
                f"but the configuration needs {BYTES} with shape {list(shape)}"
            )
        self._used.add(name)
        return file, offset

    def take_stack(self, name: str, count: int, rows: int, columns: int) -> tuple[StoredMatrix, ...]:
        """Return the `count` matrices [rows, columns] of a tensor with three dimensions, as `take`."""
        whole = self.take(name, count, rows, columns)
        size_bytes = rows * whole.stride_bytes
        return tuple(replace(whole, rows=rows, offset=whole.offset + number * size_bytes) for number in range(count))

    def take_rows(self, name: str, columns: int) -> StoredMatrix:
        """Return a matrix with `columns` and any number of rows, as `take`."""
        shape = self.shape(name)
        return self.take(name, shape[0] if shape else 0, columns)

    def refuse_leftovers(self, harmless: re.Pattern[str]) -> tuple[str, ...]:
        """Return a note on the parts of the model that are left out, if there are any.

        Raises UserError if a tensor was not used and its name does not match `harmless`.
        """
        left_out = [name for name in self._tensors if name not in self._used]
        for name in left_out:
            if not harmless.fullmatch(name):
                raise UserError(
                    f"{self._where}: {safe_name(name)}: a tensor that this architecture does not have; not supported"
                )
        matrices = [name for name in left_out if len(self.shape(name)) > 1 and name.endswith("weight")]
        parts = Counter(part for name in matrices if (part := _part_of(name)) not in OUTPUTS)
        if not parts:
            return ()
        counts = ", ".join(f"`{safe_name(part)}` ({count})" for part, count in parts.most_common(MAX_NAMED_PARTS))
        return (f"matrices are left out that computing text does not need: {counts}",)


def _part_of(name: str) -> str:
    """Return the part of a model that has this tensor: the first word of its name, or a layer with its number."""
    words = [word for word in name.split(".") if word not in WHOLE_MODEL]
    return ".".join(words[:2] if words[1:] and words[1].isdigit() else words[:1])
