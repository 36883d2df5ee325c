"""The work of a conversion: reads a checkpoint in blocks of rows, encodes them, and writes them to the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from neuronpipe.plans.convert.checkpoint import Checkpoint, ffn_name
from neuronpipe.plans.convert.checkpoint_pieces import Piece
from neuronpipe.plans.convert.encodings import can_unpack, decode_stored, same_values, unpack_gguf
from neuronpipe.plans.convert.experts_in_place import shared_rows
from neuronpipe.plans.convert.importance import ByColumn, Importance
from neuronpipe.plans.convert.journal import Squares
from neuronpipe.plans.convert.quantize import decode, encode
from neuronpipe.plans.convert.stored_tensors import RowNumbers, StoredMatrix
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.source_experts import MATRICES, expert_bytes
from neuronpipe.plans.package.tensors import predictor_name
from neuronpipe.plans.package.writer import PackageWriter, Rows
from neuronpipe.protocol.errors import UserError
from numpy.typing import NDArray

BLOCK_BYTES = 1 << 20  # of a block of float32 rows: small enough for the CPU's caches
MIN_SLAB_BYTES, MAX_SLAB_BYTES, SLAB_SHARE = (
    4 << 20,
    512 << 20,
    1 / 16,
)  # of the columns of Down that are transposed at once; SLAB_SHARE is of the model's size

Progress = Callable[[int, int], None]
"""Is called with the number of weights written so far and the number of all weights."""


def _blocks(rows: RowNumbers, columns: int, granule: int = 1) -> Iterator[RowNumbers]:
    """Yield blocks of row numbers. A block has about BLOCK_BYTES of float32 rows, and a multiple of `granule` rows
    except the last one."""
    count = max(1, BLOCK_BYTES // (4 * columns * granule)) * granule
    for start in range(0, len(rows), count):
        yield rows[start : start + count]


@dataclass
class Work:
    """A conversion under way.

    importance: weighs the errors of weights; None: all equally
    unsaved: number of weights written since the caller last wrote the journal and set this to 0
    weighed: number of weights that this process encoded by their importance
    squares: sums of squares for `errors` and `worst`
    """

    checkpoint: Checkpoint
    manifest: Manifest
    writer: PackageWriter
    progress: Progress
    importance: Importance | None = None
    unsaved: int = 0
    weighed: int = 0
    _done: int = 0
    squares: Squares = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._matrices = self.checkpoint.matrices
        self._in_place = self.manifest.source_experts is not None
        parts = [part for name, parts in self._matrices.items() if self._is_written(name) for part in parts]
        self._total = sum(part.rows * part.columns for part in parts)
        self._total += sum(map(self._predictor_weights, range(self.manifest.model.ffns)))
        share_bytes = int(sum(part.rows * part.stride_bytes for part in parts) * SLAB_SHARE)
        self._slab_bytes = min(max(share_bytes, MIN_SLAB_BYTES), MAX_SLAB_BYTES)

    def _is_written(self, name: str) -> bool:
        return not self._in_place or ".experts." not in name

    def errors(self) -> dict[str, float]:
        """Return the relative error |w - w'| / |w| of each kind of tensor, rounded to four digits, so that it does not
        depend on the block size."""
        kinds: Squares = {}
        for name, squares in self.squares.items():
            kind = name.partition(" ")[0]
            kinds[kind] = kinds.get(kind, np.zeros(2)) + squares
        return {kind: _relative(squares) for kind, squares in kinds.items()}

    def worst(self) -> tuple[str, float]:
        """Return the name of the source's tensor with the largest relative error, and the error."""
        errors = {name.partition(" ")[2]: _relative(squares) for name, squares in self.squares.items()}
        name = max(errors, key=lambda name: errors[name])
        return name, errors[name]

    def begin_after(self, pieces: Sequence[Piece], squares: Squares) -> None:
        """Begin, or continue after `pieces`, which are written already. squares: their sums of squares."""
        written = {name for piece in pieces for name in (*piece.vectors, *piece.matrices)}
        written |= {name for piece in pieces for ffn in self._ffns(piece) for name in self._predictor_names(ffn)}
        ffns = sum(len(self._ffns(piece)) for piece in pieces)
        self.writer.resume_after(written, ffns * self.manifest.layout.clusters)
        if self.checkpoint.inverse_frequency is not None:
            self.writer.vector("rope.inverse_frequency", self.checkpoint.inverse_frequency)
        if self.checkpoint.local_inverse_frequency is not None:
            self.writer.vector("rope.local_inverse_frequency", self.checkpoint.local_inverse_frequency)
        self.squares = squares
        for piece in pieces:
            names = [name for expert in range(len(piece.orders)) for name in self._ffn(piece.layer, expert).values()]
            names = [name for name in (*piece.matrices, *names) if self._is_written(name)]
            parts = [part for name in names for part in self._matrices[name]]
            self._done += sum(part.rows * part.columns for part in parts)
            self._done += sum(map(self._predictor_weights, self._ffns(piece)))

    def do(self, piece: Piece) -> None:
        """Convert a piece: its fixed tensors, its neurons, its predictors."""
        for name in piece.vectors:
            values = np.concatenate([part.vector() for part in self.checkpoint.vectors[name]])
            if name.endswith((".gate.bias", ".up.bias")):
                of_experts = zip(values.reshape(len(piece.orders), -1), piece.orders, strict=True)
                values = np.concatenate([of_expert[order] for of_expert, order in of_experts])
            self.writer.vector(name, values)
        for name in piece.matrices:
            kind = name if name in ("embedding", "output") else "attention"
            quantization = self.manifest.quantization_of(name)
            for part in self._matrices[name]:
                for rows in _blocks(np.arange(part.rows), part.columns):
                    self.writer.matrix(name, self._rows(kind, quantization, part, rows, self._importance_of(name)))
        for expert, order in enumerate(() if self._in_place else piece.orders):
            self._neurons(piece.layer, expert, order)
        if self._in_place and piece.layer is not None:
            self._shared_rows(piece.layer)
        for ffn, order in zip(self._ffns(piece), piece.orders, strict=True):
            self._predictor(ffn, order)

    def _ffns(self, piece: Piece) -> range:
        return range(0) if piece.layer is None else self.manifest.model.ffns_of(piece.layer)

    def _predictor_weights(self, ffn: int) -> int:
        model, predictor = self.manifest.model, self.manifest.predictor
        return 0 if predictor is None else predictor.rank_of(ffn) * (model.width + model.neurons)

    def _predictor_names(self, ffn: int) -> tuple[str, str, str]:
        model = self.manifest.model
        name = predictor_name(model, *model.place_of(ffn))
        return f"{name}.input", f"{name}.{model.trigger}", f"{name}.{model.trigger}.bias"

    def _predictor(self, ffn: int, order: RowNumbers) -> None:
        """Write the predictor of a feed-forward, if the package gets predictors. Zeros pad the rank to whole groups."""
        predictors, predictor = self.checkpoint.predictors, self.manifest.predictor
        if predictors is None or predictor is None:
            return
        first, second = predictors.first[ffn], predictors.second[ffn]
        missing = predictor.rank_of(ffn) - first.rows
        inner, side, bias = self._predictor_names(ffn)
        self.writer.predictor_vector(bias, np.full(len(order), predictors.bias))
        for rows in _blocks(np.arange(first.rows), first.columns):
            values = first.values(rows)
            if rows[-1] == first.rows - 1:
                values = np.pad(values, ((0, missing), (0, 0)))
            self.writer.predictor_matrix(inner, self._encode("predictor", predictor.quantization, first, values))
        for rows in _blocks(order, second.columns):
            values = np.pad(second.values(rows), ((0, 0), (0, missing)))
            self.writer.predictor_matrix(side, self._encode("predictor", predictor.quantization, second, values))

    def _ffn(self, layer: int | None, expert: int) -> dict[str, str]:
        model = self.manifest.model
        return {matrix: ffn_name(model, f"layers.{layer}", expert, matrix) for matrix in model.ffn_matrices}

    def _neurons(self, layer: int | None, expert: int, order: RowNumbers) -> None:
        rows_of = {matrix: self._matrices[name][0] for matrix, name in self._ffn(layer, expert).items()}
        quantizations = {matrix: self.manifest.row_quantization(matrix) for matrix in rows_of}
        importance = {matrix: self._importance_of(name) for matrix, name in self._ffn(layer, expert).items()}
        if self.manifest.layout.down_by_output:
            slices = (self._slices(name, quantizations[name], rows_of[name], importance[name]) for name in rows_of)
            for of_slice in zip(*slices, strict=True):
                self.writer.neurons(*of_slice)
            return
        importance["down"] = None  # all weights of a neuron's row have the same input
        if self.checkpoint.down_by_neuron:
            for rows in _blocks(order, self.manifest.model.width, self.manifest.layout.cluster_neurons):
                self.writer.neurons(
                    *(
                        self._rows(name, quantizations[name], matrix, rows, importance[name])
                        for name, matrix in rows_of.items()
                    )
                )
            return
        down = rows_of.pop("down")
        granule = self.manifest.layout.cluster_neurons
        slab_neurons = max(1, self._slab_bytes // (4 * down.rows * granule)) * granule
        for start in range(0, len(order), slab_neurons):
            neurons = order[start : start + slab_neurons]
            columns = _transposed(down, neurons)
            written = 0
            for rows in _blocks(neurons, self.manifest.model.width, granule):
                self.writer.neurons(
                    *(
                        self._rows(name, quantizations[name], matrix, rows, importance[name])
                        for name, matrix in rows_of.items()
                    ),
                    self._encode("down", quantizations["down"], down, columns[written : written + len(rows)]),
                )
                written += len(rows)

    def _slices(
        self, kind: str, quantization: Quantization, matrix: StoredMatrix, importance: ByColumn | None
    ) -> Iterator[Rows]:
        """Yield the encoded rows of a matrix for each slice of its feed-forward: some rows, or of Down some columns."""
        layout, neurons = self.manifest.layout, self.manifest.layout.cluster_neurons
        if kind != "down":
            for start in range(0, matrix.rows, neurons):
                stored = matrix.stored(np.arange(start, start + neurons))
                yield self._whole(kind, quantization, matrix, stored, matrix.columns, importance)
            return
        slab = max(1, self._slab_bytes // (4 * matrix.rows * neurons))
        for first in range(0, layout.slices, slab):
            count = min(slab, layout.slices - first)
            part = matrix if count == layout.slices else matrix.column_part(first * neurons, count * neurons)
            blocks = [part.stored(rows) for rows in _blocks(np.arange(part.rows), part.columns)]
            stored = np.concatenate(blocks).reshape(part.rows, count, -1)
            for number in range(count):
                start = (first + number) * neurons
                of_columns = None if importance is None else importance[start : start + neurons]
                yield self._whole(kind, quantization, part, stored[:, number], neurons, of_columns)

    def _whole(
        self,
        kind: str,
        quantization: Quantization,
        matrix: StoredMatrix,
        stored: NDArray[np.uint8],
        columns: int,
        importance: ByColumn | None,
    ) -> Rows:
        """Return stored rows of a matrix, or some columns of them, encoded block by block."""
        blocks = [np.ascontiguousarray(stored[rows]) for rows in _blocks(np.arange(len(stored)), columns)]
        encoded = [self._encoded(kind, quantization, matrix, block, importance) for block in blocks]
        return Rows(*map(np.concatenate, zip(*encoded, strict=True)))

    def _shared_rows(self, layer: int) -> None:
        """Write the rows of experts that compute every token, where the others are read in place."""
        manifest, experts = self.manifest, self.manifest.source_experts
        assert experts is not None
        for run, (of_layer, first, count) in enumerate(manifest.model.runs):
            for matrix in MATRICES if of_layer == layer else ():
                place = experts.matrices[matrix][run]
                if place.file < len(experts.files):
                    continue
                size_bytes = expert_bytes(place.encoding, manifest.layout, matrix, manifest.model.width)
                for number in range(count):
                    name = ffn_name(manifest.model, f"layers.{layer}", first + number, matrix)
                    rows = shared_rows(self._matrices[name][0])
                    self.writer.shared_rows(place.offset + number * size_bytes, rows)

    def _importance_of(self, name: str) -> ByColumn | None:
        return None if self.importance is None else self.importance.by_matrix.get(name)

    def _rows(
        self,
        kind: str,
        quantization: Quantization,
        matrix: StoredMatrix,
        rows: RowNumbers,
        importance: ByColumn | None,
    ) -> Rows:
        """Return rows of a matrix, encoded."""
        return self._encoded(kind, quantization, matrix, matrix.stored(rows), importance)

    def _encoded(
        self,
        kind: str,
        quantization: Quantization,
        matrix: StoredMatrix,
        stored: NDArray[np.uint8],
        importance: ByColumn | None,
    ) -> Rows:
        """Return encoded rows. Values are those of the source if the quantization can express them."""
        same = same_values(matrix.encoding, quantization, stored)
        if same is None:
            decoded = matrix.checked(decode_stored(matrix.encoding, stored))
            # A first start waits for this, and the search for the best scales would take most of the time.
            if self._in_place and can_unpack(matrix.encoding, quantization):
                fast = unpack_gguf(matrix.encoding, stored, matrix.columns, quantization)
                if fast is not None:
                    self._count(kind, matrix, decoded, decode(quantization, fast))
                    return fast
            return self._encode(kind, quantization, matrix, decoded, importance)
        values = matrix.checked(decode(quantization, same))
        self._count(kind, matrix, values, values)
        return same

    def _encode(
        self,
        kind: str,
        quantization: Quantization,
        matrix: StoredMatrix,
        values: NDArray[np.float32],
        importance: ByColumn | None = None,
    ) -> Rows:
        self.weighed += 0 if importance is None else values.size
        try:
            rows = encode(quantization, values, importance)
        except OverflowError:
            raise UserError(f"{matrix.file.path}: {matrix.name}: values too large for fp16: damaged") from None
        self._count(kind, matrix, values, decode(quantization, rows))
        return rows

    def _count(
        self, kind: str, matrix: StoredMatrix, values: NDArray[np.float32], decoded: NDArray[np.float32]
    ) -> None:
        error = 0.0 if decoded is values else np.square(values - decoded).sum(dtype=np.float64)
        squares = self.squares.setdefault(f"{kind} {matrix.name}", np.zeros(2))
        squares += (error, np.square(values).sum(dtype=np.float64))
        self._done += values.size
        self.unsaved += values.size
        self.progress(self._done, self._total)


def _relative(squares: NDArray[np.float64]) -> float:
    error, weight = squares
    return float(f"{np.sqrt(error / weight) if weight else 0.0:.4g}")


def _transposed(down: StoredMatrix, neurons: RowNumbers) -> NDArray[np.float32]:
    """Return the columns of Down that belong to `neurons` as rows, [len(neurons), width]. Reads all of Down."""
    columns = np.empty((len(neurons), down.rows), dtype=np.float32)
    for rows in _blocks(np.arange(down.rows), down.columns):
        columns[:, rows[0] : rows[-1] + 1] = down.values(rows)[:, neurons].T
    return columns
