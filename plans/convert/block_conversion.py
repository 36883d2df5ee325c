"""The work of a conversion: reads pieces of a checkpoint in blocks of rows, encodes them, and writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from neuronpipe.plans.convert.checkpoint import Checkpoint, RowNumbers, StoredMatrix, ffn_name
from neuronpipe.plans.convert.checkpoint_pieces import Piece
from neuronpipe.plans.convert.encodings import decode_stored, same_values
from neuronpipe.plans.convert.importance import ByColumn, Importance
from neuronpipe.plans.convert.journal import Squares
from neuronpipe.plans.convert.quantize import decode, encode
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.tensors import predictor_name
from neuronpipe.plans.package.writer import PackageWriter, Rows
from neuronpipe.protocol.errors import UserError
from numpy.typing import NDArray

BLOCK_BYTES = 1 << 20  # of float32 rows at a time: small enough for the caches
MIN_SLAB_BYTES, MAX_SLAB_BYTES, SLAB_SHARE = (
    4 << 20,
    512 << 20,
    1 / 16,
)  # of a transposed Down; share of the model's size

Progress = Callable[[int, int], None]
"""Called with the number of weights written so far and the number of all weights."""


def _blocks(rows: RowNumbers, columns: int, granule: int = 1) -> Iterator[RowNumbers]:
    """Split row numbers into blocks of about BLOCK_BYTES as float32, multiples of `granule` except the last."""
    count = max(1, BLOCK_BYTES // (4 * columns * granule)) * granule
    for start in range(0, len(rows), count):
        yield rows[start : start + count]


@dataclass
class Work:
    """A conversion under way.

    importance: weighs the errors of weights
    unsaved: weights since its journal was last written
    weighed: weights that were encoded by their importance in this process
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
        parts = [part for parts in self._matrices.values() for part in parts]
        self._total = sum(part.rows * part.columns for part in parts)
        self._total += sum(map(self._predictor_weights, range(self.manifest.model.ffns)))
        share_bytes = int(sum(part.rows * part.stride_bytes for part in parts) * SLAB_SHARE)
        self._slab_bytes = min(max(share_bytes, MIN_SLAB_BYTES), MAX_SLAB_BYTES)

    def errors(self) -> dict[str, float]:
        """Return the relative rms error per kind of tensor, |w - w'| / |w|, to four digits, which is the same for any
        block size."""
        kinds: Squares = {}
        for name, squares in self.squares.items():
            kind = name.partition(" ")[0]
            kinds[kind] = kinds.get(kind, np.zeros(2)) + squares
        return {kind: _relative(squares) for kind, squares in kinds.items()}

    def worst(self) -> tuple[str, float]:
        """Return the source's tensor with the largest relative rms error, and that error."""
        errors = {name.partition(" ")[2]: _relative(squares) for name, squares in self.squares.items()}
        name = max(errors, key=lambda name: errors[name])
        return name, errors[name]

    def begin_after(self, pieces: Sequence[Piece], squares: Squares) -> None:
        """Continue after these pieces, which are written, with their sums of squares."""
        written = {name for piece in pieces for name in (*piece.vectors, *piece.matrices)}
        written |= {name for piece in pieces for ffn in self._ffns(piece) for name in self._predictor_names(ffn)}
        self.writer.resume_after(
            written,
            sum(piece.layer is not None for piece in pieces) * self.manifest.clusters // self.manifest.model.layers,
        )
        if self.checkpoint.inverse_frequency is not None:
            self.writer.vector("rope.inverse_frequency", self.checkpoint.inverse_frequency)
        self.squares = squares
        for piece in pieces:
            names = [name for expert in range(len(piece.orders)) for name in self._ffn(piece.layer, expert).values()]
            parts = [part for name in (*piece.matrices, *names) for part in self._matrices[name]]
            self._done += sum(part.rows * part.columns for part in parts)
            self._done += sum(map(self._predictor_weights, self._ffns(piece)))

    def do(self, piece: Piece) -> None:
        """Convert one piece: its fixed tensors, then its neurons."""
        for name in piece.vectors:
            if not name.endswith(".up.bias"):  # written with the neurons, in their order
                parts = self.checkpoint.vectors[name]
                self.writer.vector(name, np.concatenate([part.vector() for part in parts]))
        for name in piece.matrices:
            kind = name if name in ("embedding", "output") else "attention"
            quantization = self.manifest.quantization_of(name)
            for part in self._matrices[name]:
                for rows in _blocks(np.arange(part.rows), part.columns):
                    self.writer.matrix(name, self._rows(kind, quantization, part, rows, self._importance_of(name)))
        for expert, order in enumerate(piece.orders):
            self._neurons(piece.layer, expert, order)
        for ffn, order in zip(self._ffns(piece), piece.orders, strict=True):
            self._predictor(ffn, order)

    def _ffns(self, piece: Piece) -> range:
        """Return the numbers of a piece's feed-forwards."""
        experts = self.manifest.model.experts
        return range(0) if piece.layer is None else range(piece.layer * experts, (piece.layer + 1) * experts)

    def _predictor_weights(self, ffn: int) -> int:
        """Return the number of weights of a feed-forward's predictor in the package."""
        model, predictor = self.manifest.model, self.manifest.predictor
        return 0 if predictor is None else predictor.rank_of(ffn) * (model.width + model.neurons)

    def _predictor_names(self, ffn: int) -> tuple[str, str, str]:
        """Return the names of a predictor's three tensors in a package: fc1, fc2, the bias of fc2."""
        model = self.manifest.model
        name = predictor_name(model, *divmod(ffn, model.experts))
        return f"{name}.input", f"{name}.{model.trigger}", f"{name}.{model.trigger}.bias"

    def _predictor(self, ffn: int, order: RowNumbers) -> None:
        """Write the predictor of one feed-forward, if the source has predictors, padded with zeros to whole groups."""
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
        """Return the names of a feed-forward's matrices, by matrix."""
        model = self.manifest.model
        return {matrix: ffn_name(model, f"layers.{layer}", expert, matrix) for matrix in model.ffn_matrices}

    def _neurons(self, layer: int | None, expert: int, order: RowNumbers) -> None:
        """Write the neurons of one feed-forward in the given order."""
        if (name := f"layers.{layer}.up.bias") in self.checkpoint.vectors:
            self.writer.vector(name, self.checkpoint.vectors[name][0].vector()[order])
        rows_of = {matrix: self._matrices[name][0] for matrix, name in self._ffn(layer, expert).items()}
        quantizations = {matrix: self.manifest.row_quantization(matrix) for matrix in rows_of}
        importance = {matrix: self._importance_of(name) for matrix, name in self._ffn(layer, expert).items()}
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

    def _importance_of(self, name: str) -> ByColumn | None:
        """Return the importance of the columns of a matrix, by its name in the checkpoint."""
        return None if self.importance is None else self.importance.by_matrix.get(name)

    def _rows(
        self,
        kind: str,
        quantization: Quantization,
        matrix: StoredMatrix,
        rows: RowNumbers,
        importance: ByColumn | None,
    ) -> Rows:
        """Encode some rows, or copy them if the quantization can express their stored values."""
        stored = matrix.stored(rows)
        same = same_values(matrix.encoding, quantization, stored)
        if same is None:
            decoded = matrix.checked(decode_stored(matrix.encoding, stored))
            return self._encode(kind, quantization, matrix, decoded, importance)
        values = matrix.checked(decode_stored(matrix.encoding, stored))
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
    """Return the root of error over weight, to four digits."""
    error, weight = squares
    return float(f"{np.sqrt(error / weight) if weight else 0.0:.4g}")


def _transposed(down: StoredMatrix, neurons: RowNumbers) -> NDArray[np.float32]:
    """Return columns of Down as rows, float32 [len(neurons), width]. Down is read row by row."""
    columns = np.empty((len(neurons), down.rows), dtype=np.float32)
    for rows in _blocks(np.arange(down.rows), down.columns):
        columns[:, rows[0] : rows[-1] + 1] = down.values(rows)[:, neurons].T
    return columns
