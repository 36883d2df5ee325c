"""A model in its source files, in one form for every source format: the input of a conversion."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from neuronpipe.plans.convert.chat_template import ChatTemplate, ExamineTemplate
from neuronpipe.plans.convert.encodings import ENCODINGS, PLAIN_BYTES, decode_stored, row_bytes
from neuronpipe.plans.convert.end_tokens import EndToken
from neuronpipe.plans.convert.source_file import SourceFile
from neuronpipe.plans.models.family import TensorNames
from neuronpipe.plans.models.spec import Activation, ModelSpec
from neuronpipe.plans.package.manifest import MAX_RANK, Source
from neuronpipe.protocol.errors import UserError, quoted, safe_name
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

RowNumbers = NDArray[np.int64]
MAX_TENSORS = 1 << 18  # in all files of a model together


@frozen
class StoredMatrix:
    """Rows of one encoding at equal distances in a file. A vector is a matrix of one row, or after `as_column` of one
    column.

    order: row r is the stored row order[r]; None: as stored
    offset_added: added to every element by `vector`
    """

    name: str
    file: SourceFile
    offset: int
    rows: int
    columns: int
    encoding: str
    order: RowNumbers | None = None
    offset_added: float = 0.0

    def reordered(self, order: RowNumbers | None) -> StoredMatrix:
        return replace(self, order=order)

    def rows_from(self, first: int, count: int) -> StoredMatrix:
        """Return a matrix of `count` stored rows, from row `first` on. Raises UserError if there are fewer."""
        if first + count > self.rows:
            raise UserError(f"{self.file.path}: {self.name}: {self.rows} rows, but {first + count} are needed")
        return replace(self, offset=self.offset + first * self.stride_bytes, rows=count)

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
        target = np.empty((len(rows), stride), dtype=np.uint8)
        # Consecutive stored rows are read at once.
        breaks = np.flatnonzero(np.diff(places) != 1) + 1
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

    def vector(self) -> NDArray[np.float32]:
        """Return all values in one dimension, plus `offset_added`."""
        values = self.values(np.arange(self.rows, dtype=np.int64)).reshape(-1)
        return values + np.float32(self.offset_added) if self.offset_added else values


OpenFile = Callable[[Path], SourceFile]
"""Opens a file of weights: `SourceFile` for files on this disk, or a function for files that are downloaded."""

Stack = Mapping[str, tuple[StoredMatrix, ...]]
"""Name -> the stored tensors of which it consists, one below the other."""


class Inventory:
    """The tensors of a source by name. It records which are used, so that tensors are not ignored silently."""

    def __init__(self, where: Path) -> None:
        self._where = where
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
        if encoding not in ENCODINGS or row_bytes(encoding, shape[-1]) is None:
            raise UserError(f"{file.path}: {safe_name(name)}: {encoding} is not supported; {', '.join(ENCODINGS)} are")
        self._used.add(name)
        return StoredMatrix(name, file, offset, shape[0] if len(shape) > 1 else 1, shape[-1], encoding)

    def take_stack(self, name: str, count: int, rows: int, columns: int) -> tuple[StoredMatrix, ...]:
        """Return the `count` matrices [rows, columns] of a tensor with three dimensions, as `take`."""
        whole = self.take(name, count, rows, columns)
        row = replace(whole, rows=count * rows)
        return tuple(replace(row.rows_from(number * rows, rows), rows=rows) for number in range(count))

    def take_rows(self, name: str, columns: int) -> StoredMatrix:
        """Return a matrix with `columns` and any number of rows, as `take`."""
        shape = self.shape(name)
        return self.take(name, shape[0] if shape else 0, columns)

    def refuse_leftovers(self, harmless: re.Pattern[str]) -> None:
        """Raise UserError if a tensor was not used and its name does not match `harmless`."""
        for name in self._tensors:
            if name not in self._used and not harmless.fullmatch(name):
                raise UserError(
                    f"{self._where}: {safe_name(name)}: a tensor that this architecture does not have; not supported"
                )


class Options(NamedTuple):
    """Choices of the user that override the source. None leaves the choice to the source.

    predictor: convert the source's predictors
    examine_template: tries the chat template; None: the template is not tried
    """

    activation: Activation | None = None
    tokenizer: Path | None = None
    context_tokens: int | None = None
    chat_template: Path | None = None
    predictor: bool = True
    examine_template: ExamineTemplate | None = None


@frozen
class SourcePredictors:
    """Predictors in a source. Scores are second . relu(first . x), with x the residual stream before the feed-forward's
    norm.

    first: for each feed-forward, by layer * experts + expert, the matrix fc1 [rank, width]
    second: likewise fc2 [neurons, rank]
    threshold: a neuron is predicted if its score is at least this; None: if its score is above 0
    """

    first: tuple[StoredMatrix, ...]
    second: tuple[StoredMatrix, ...]
    threshold: float | None

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(matrix.rows for matrix in self.first)

    @property
    def bias(self) -> np.float32:
        """Number to add to scores, so that exactly the predicted neurons have positive scores."""
        if self.threshold is None:
            return np.float32(0)
        return max(np.nextafter(np.float32(-self.threshold), np.float32(np.inf)), np.finfo(np.float32).tiny, key=abs)


@frozen
class Checkpoint:
    """Everything about a model that a conversion needs. A context manager that closes the files.

    tokenizer: content of tokenizer.json
    notes: what the user should know about the resulting package
    inverse_frequency: table of rotary positions [head_width / 2]; None with other positions
    matrices, vectors: tensors by names of fixed.safetensors; matrices of feed-forwards by `ffn_name`. Query, key and
        value matrices are three tensors of one name
    down_by_neuron: Down is stored as [neurons, width], otherwise as [width, neurons]
    """

    source: Source
    model: ModelSpec
    ends: tuple[EndToken, ...]
    tokenizer: bytes
    chat_template: ChatTemplate | None
    notes: tuple[str, ...]
    inverse_frequency: NDArray[np.float32] | None
    matrices: Stack
    vectors: Stack
    down_by_neuron: bool = False
    predictors: SourcePredictors | None = None
    files: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.files.close()


def ffn_name(model: ModelSpec, layer: str, expert: int, matrix: str) -> str:
    """Return the name of a feed-forward's matrix in a Checkpoint.

    layer: the prefix of the layer's names
    matrix: gate, up or down
    """
    return f"{layer}.{matrix}" if model.experts == 1 else f"{layer}.experts.{expert}.{matrix}"


def take_tensors(
    inventory: Inventory,
    model: ModelSpec,
    names: TensorNames,
    orders: Mapping[str, RowNumbers] | None = None,
    *,
    norm_offset: float = 0.0,
    down_by_neuron: bool = False,
) -> tuple[Stack, Stack]:
    """Return (matrices, vectors) of a Checkpoint. Raises UserError as `Inventory.take`.

    names: names in the source
    orders: order of the rows of `query`, `key` or `query_key_value`, if the source stores them in another order than
        packages
    norm_offset: added to the stored weights of norms
    down_by_neuron: the field of Checkpoint
    """
    tensors = _Tensors(inventory, model, names, orders or {}, norm_offset, down_by_neuron)
    tensors.take_around_layers()
    for number in range(model.layers):
        tensors.take_layer(number)
    return tensors.matrices, tensors.vectors


def take_predictors(
    inventory: Inventory, model: ModelSpec, names: TensorNames, *, enabled: bool, threshold: float | None = None
) -> SourcePredictors | None:
    """Return the predictors of a source; None if it has none, if they are not `enabled`, or for SiLU, with which every
    neuron fires. Raises UserError, which names file and tensor, if one is missing or does not fit the model.

    threshold: the field of SourcePredictors
    """
    if names.predictor is None:
        return None
    within = [
        f"{names.layer.format(layer)}{names.expert.format(expert) if model.experts > 1 else ''}"
        for layer in range(model.layers)
        for expert in range(model.experts)
    ]
    stored = [tuple(f"{place}{names.predictor.format(matrix)}.weight" for matrix in (1, 2)) for place in within]
    present = [name for pair in stored for name in pair if inventory.has(name)]
    if not present:
        return None
    if not enabled or model.activation == "silu":
        for name in present:
            inventory.leave(name)
        return None
    pairs = [_take_predictor(inventory, model, first, second) for first, second in stored]
    return SourcePredictors(tuple(first for first, _ in pairs), tuple(second for _, second in pairs), threshold)


def _take_predictor(
    inventory: Inventory, model: ModelSpec, first: str, second: str
) -> tuple[StoredMatrix, StoredMatrix]:
    shapes = [inventory.shape(name) for name in (first, second)]
    rank = shapes[0][0] if len(shapes[0]) == 2 else 0
    for name, actual, expected in (
        (first, shapes[0], (rank, model.width)),
        (second, shapes[1], (model.neurons, rank)),
    ):
        if not 0 < rank <= MAX_RANK or actual != expected:
            raise UserError(
                f"{inventory.file(name)}: {safe_name(name)}: has shape {quoted(list(actual))}; a predictor's fc1 is "
                f"[rank, {model.width}] and its fc2 [{model.neurons}, rank], and fc1 has rank {rank}; "
                "`--no-predictor` converts without predictors"
            )
    return inventory.take(first, rank, model.width), inventory.take(second, model.neurons, rank)


class _Tensors:
    """The tensors that `take_tensors` collects, by their names in a Checkpoint."""

    def __init__(
        self,
        inventory: Inventory,
        model: ModelSpec,
        names: TensorNames,
        orders: Mapping[str, RowNumbers],
        norm_offset: float,
        down_by_neuron: bool,
    ) -> None:
        self.matrices: dict[str, tuple[StoredMatrix, ...]] = {}
        self.vectors: dict[str, tuple[StoredMatrix, ...]] = {}
        self._inventory, self._model, self._names, self._orders = inventory, model, names, orders
        self._norm_offset = norm_offset
        self._down_by_neuron = down_by_neuron

    def take_around_layers(self) -> None:
        model, names = self._model, self._names
        self.matrices["embedding"] = (self._weight(names.embedding, model.vocabulary, model.width),)
        if not model.tied_embeddings:
            self.matrices["output"] = (self._weight(names.output, model.vocabulary, model.width),)
        if model.positions == "learned":
            table = self._inventory.take_rows(f"{self._name('positions')}.weight", model.width)
            self.vectors["position_embedding"] = (table.rows_from(names.first_position, model.context_tokens),)
        self._take_norm("output_norm", names.output_norm)

    def take_layer(self, number: int) -> None:
        prefix, layer = f"layers.{number}", self._names.layer.format(number)
        self._take_norm(f"{prefix}.attention_norm", f"{layer}{self._names.attention_norm}")
        self._take_norm(f"{prefix}.ffn_norm", f"{layer}{self._names.ffn_norm}")
        self._take_projections(prefix, layer)
        self._take_attention_output(prefix, layer)
        if self._model.head_norm:
            self._take_head_norms(prefix, layer)
        self._take_ffn(prefix, layer)

    def _take_projections(self, prefix: str, layer: str) -> None:
        model, orders = self._model, self._orders
        rows = {"query": model.query_width, "key": model.key_width, "value": model.key_width}
        if self._names.query_key_value is not None:
            rows = {"query_key_value": model.qkv_rows}
        stored = {part: f"{layer}{getattr(self._names, part)}" for part in rows}
        self.matrices[f"{prefix}.qkv"] = tuple(
            self._weight(stored[part], rows[part], model.width).reordered(orders.get(part)) for part in rows
        )
        if model.qkv_bias:
            self.vectors[f"{prefix}.qkv.bias"] = tuple(
                self._bias(stored[part], rows[part]).as_column().reordered(orders.get(part)) for part in rows
            )

    def _take_attention_output(self, prefix: str, layer: str) -> None:
        model, stored = self._model, f"{layer}{self._names.attention_output}"
        self.matrices[f"{prefix}.attention_output"] = (self._weight(stored, model.width, model.query_width),)
        if model.output_bias:
            self.vectors[f"{prefix}.attention_output.bias"] = (self._bias(stored, model.width),)

    def _take_head_norms(self, prefix: str, layer: str) -> None:
        head_width = self._model.head_width
        for part in ("query", "key"):
            weights = self._weight(f"{layer}{self._name(f'{part}_norm')}", head_width).as_column()
            of_one_head = self._orders[part][:head_width] if part in self._orders else None
            self.vectors[f"{prefix}.{part}_norm"] = (weights.reordered(of_one_head).plus(self._norm_offset),)

    def _take_ffn(self, prefix: str, layer: str) -> None:
        neurons, width, experts = self._model.neurons, self._model.width, self._model.experts
        if experts > 1:
            self.vectors[f"{prefix}.router"] = (self._weight(f"{layer}{self._name('router')}", experts, width),)
        down = (neurons, width) if self._down_by_neuron else (width, neurons)
        shapes = {"gate": (neurons, width), "up": (neurons, width), "down": down}
        for matrix in self._model.ffn_matrices:
            for expert, tensor in enumerate(self._take_experts(layer, self._name(matrix), *shapes[matrix])):
                self.matrices[ffn_name(self._model, prefix, expert, matrix)] = (tensor,)
        if self._model.ffn_bias:
            self.vectors[f"{prefix}.up.bias"] = (self._bias(f"{layer}{self._names.up}", neurons).as_column(),)
            self.vectors[f"{prefix}.down.bias"] = (self._bias(f"{layer}{self._names.down}", width),)

    def _take_norm(self, name: str, stored: str) -> None:
        self.vectors[name] = (self._weight(stored, self._model.width).plus(self._norm_offset),)
        if self._model.norm == "layer":
            self.vectors[f"{name}.bias"] = (self._bias(stored, self._model.width),)

    def _take_experts(self, layer: str, name: str, rows: int, columns: int) -> Sequence[StoredMatrix]:
        """Return the matrix [rows, columns] with this name of each expert of a layer."""
        experts = self._model.experts
        if self._names.stacked:
            return self._inventory.take_stack(f"{layer}{name}.weight", experts, rows, columns)
        parents = [self._names.expert.format(number) for number in range(experts)] if experts > 1 else [""]
        return [self._weight(f"{layer}{parent}{name}", rows, columns) for parent in parents]

    def _weight(self, stored: str, *shape: int) -> StoredMatrix:
        return self._inventory.take(f"{stored}.weight", *shape)

    def _bias(self, stored: str, length: int) -> StoredMatrix:
        return self._inventory.take(f"{stored}.bias", length)

    def _name(self, field: str) -> str:
        """Return the source's name of a tensor that only some models have. field: its field of TensorNames."""
        name = getattr(self._names, field)
        assert name is not None, f"a family whose models have {field} names it"
        return str(name)
