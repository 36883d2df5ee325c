"""The conversion: from a checkpoint to a package in blocks of rows, in a fraction of the model's size of RAM."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from neuronpipe.plans.convert.advice import refuse_no_source
from neuronpipe.plans.convert.chat_template import ExamineTemplate
from neuronpipe.plans.convert.checkpoint import Checkpoint, Options, RowNumbers, SourceFile, StoredMatrix, ffn_name
from neuronpipe.plans.convert.encodings import PLAIN_BYTES, decode_stored, nearest_quantization, same_encoding
from neuronpipe.plans.convert.end_tokens import EndToken
from neuronpipe.plans.convert.gguf_model import open_gguf
from neuronpipe.plans.convert.huggingface import open_huggingface
from neuronpipe.plans.convert.journal import Done, Journal, Squares
from neuronpipe.plans.convert.pieces import Piece, pieces_of, read_frequencies
from neuronpipe.plans.convert.quantize import decode, encode
from neuronpipe.plans.models.spec import Activation, ModelSpec
from neuronpipe.plans.package.fields import one_line
from neuronpipe.plans.package.layout import GROUP_WEIGHTS, NeuronOrder, Quantization, compute_layout
from neuronpipe.plans.package.manifest import Chat, Manifest, Predictor, package_rank
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.tensors import predictor_name
from neuronpipe.plans.package.writer import PackageWriter, Rows, package_bytes
from neuronpipe.protocol.errors import UserError
from numpy.typing import NDArray

BLOCK_BYTES = 1 << 20  # of float32 rows in work at a time: small enough for the caches
MIN_SLAB_BYTES, MAX_SLAB_BYTES, SLAB_SHARE = (
    4 << 20,
    512 << 20,
    1 / 16,
)  # of a transposed Down; share of the model's size

PACKAGE_PLACE = "package"  # in the place where interrupted work stays
HELD_BYTES = 8 << 20  # that the C library may hold for the next block, twice
KEPT_WEIGHTS = 1 << 27  # at most so many, and those of one piece, are converted again after a kill

Progress = Callable[[int, int], None]
"""Called with the number of weights that are written and the number of all weights."""


class Encoded(NamedTuple):
    """What encoding did to the matrices. The error is against the values that the source stores: a source that is
    quantized had lost something before. ends: the tokens that end a text; notes: what a person should know."""

    source_weights: Mapping[str, int]  # the source's encoding -> how many weights, the most first
    worst_tensor: str
    worst_error: float  # |w - w'| / |w|
    ends: tuple[EndToken, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def source_was_quantized(self) -> bool:
        """Whether any matrix had lost something before."""
        return not set(self.source_weights) <= set(PLAIN_BYTES)


Report = Callable[[Encoded], None]
"""Called once, when the package is complete."""


def convert(
    source: Path,
    target: Path,
    *,
    quantization: Quantization | None = None,
    gates: Quantization | None = None,
    activation: Activation | None = None,
    frequencies: Path | None = None,
    tokenizer: Path | None = None,
    context_tokens: int | None = None,
    chat_template: Path | None = None,
    name: str | None = None,
    predictor: bool = True,
    examine_template: ExamineTemplate | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    report: Report | None = None,
) -> Package:
    """Convert a Hugging Face directory or a GGUF file into a package.

    quantization: None chooses the one whose size is near the source's. gates: "q3", where they are to take fewer bits
    than the rest, which is then q4. report is called when all is encoded.
    activation, tokenizer, context_tokens, chat_template and name replace what the source says. frequencies is a .npy of
    firing shares [layers, experts, neurons]; neurons are then stored hot first. predictor: take the source's, if any.
    examine_template: see `Options`.
    Configuration, headers and shapes are checked before anything is written. Raises UserError for whatever is wrong
    with source, target or disk; then nothing is left. Where the process was killed, the next conversion of the same
    goes on.
    """
    options = Options(activation, tokenizer, context_tokens, chat_template, predictor, examine_template)
    with open_checkpoint(source, options) as checkpoint:
        conversion = Conversion(checkpoint, quantization=quantization, gates=gates, frequencies=frequencies, name=name)
        return conversion.write(target, overwrite=overwrite, progress=progress, report=report)


def open_checkpoint(path: Path, options: Options) -> Checkpoint:
    """Open a Hugging Face directory or a GGUF file: recognized by its content, not by its name."""
    refuse_no_source(path)
    if path.is_dir():
        return open_huggingface(path, options)
    return open_gguf(path, options)


class Conversion:
    """What becomes of a checkpoint, known before its weights are read.

    It is done in pieces, in the order in which checkpoints lie in their files: the embedding, the layers one by one,
    the output. So a file is needed for some pieces in a row, and files can come and go.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        quantization: Quantization | None = None,
        gates: Quantization | None = None,
        frequencies: Path | None = None,
        name: str | None = None,
    ) -> None:
        model, chat = checkpoint.model, checkpoint.chat_template
        self._source_weights = _weights_by_encoding(checkpoint)
        quantization = quantization or ("q4" if gates else nearest_quantization(self._source_weights))
        _require_groups(checkpoint, quantization)
        if gates is not None:
            _require_gates(model, quantization, gates)
        shares = None if frequencies is None else read_frequencies(frequencies, model)
        neuron_order: NeuronOrder = "source" if shares is None else "frequency"
        self.checkpoint = checkpoint
        self.manifest = Manifest(
            name=one_line(name or checkpoint.source.name),
            source=checkpoint.source,
            model=model,
            quantization=quantization,
            end_tokens=tuple(end.token for end in checkpoint.ends),
            layout=compute_layout(
                quantization,
                model.width,
                model.neurons,
                model.ffn_matrices,
                neuron_order,
                gates=gates,
                read_whole=model.read_whole,
            ),
            files={},
            quantization_error={},
            chat=None if chat is None else Chat(begin=chat.begin, end=chat.end),
            fired_by_layer=None if shares is None else tuple(float(share) for share in shares.mean(axis=(1, 2))),
            predictor=_predictor(checkpoint, quantization),
        )
        self.pieces = pieces_of(checkpoint, shares)
        self._shares = "" if shares is None else hashlib.sha256(shares.tobytes()).hexdigest()

    @property
    def package_bytes(self) -> int:
        """What the package takes on disk."""
        return package_bytes(self.manifest) + len(self.checkpoint.tokenizer)

    def write(
        self,
        target: Path,
        *,
        overwrite: bool,
        progress: Progress | None = None,
        report: Report | None = None,
        place: Path | None = None,
    ) -> Package:
        """Convert, and let the package appear as `target`.

        place: a folder on the same disk where the work stays when it is interrupted, and goes on after whatever was
        done there for the same package. Without one only a kill leaves something, beside the target.
        """
        _hold_freed_memory()
        with PackageWriter(
            target,
            self.manifest,
            overwrite=overwrite,
            place=None if place is None else place / PACKAGE_PLACE,
            goes_on=lambda folder: self._journal(folder).read().pieces > 0,
        ) as writer:
            work = _Work(self.checkpoint, self.manifest, writer, progress or (lambda done, total: None))
            journal = self._journal(writer.path)
            done = journal.read()
            work.begin_after(self.pieces[: done.pieces], done.squares)
            for number, piece in enumerate(self.pieces[done.pieces :], done.pieces):
                for file in piece.files:
                    file.fetch()
                work.do(piece)
                leaving = set(piece.files) - self.files_from(number + 1)
                if leaving or work.unsaved >= KEPT_WEIGHTS:
                    writer.sync()
                    journal.write(Done(number + 1, work.squares))
                    work.unsaved = 0
                for file in leaving:
                    file.release()
            chat = self.checkpoint.chat_template
            writer.complete(self.checkpoint.tokenizer, work.errors(), None if chat is None else chat.text)
            journal.remove()
            package = writer.publish()
        if report is not None:
            report(Encoded(self._source_weights, *work.worst(), self.checkpoint.ends, self.checkpoint.notes))
        return package

    def pieces_done(self, place: Path) -> int:
        """How many pieces work in this place has done already."""
        return self._journal(place / PACKAGE_PLACE).read().pieces

    def _journal(self, folder: Path) -> Journal:
        """How far the work in a folder is, if it is of this package, from these files as they are now."""
        versions = sorted(file.version for file in self.files_from(0))
        return Journal(folder, self.manifest, [*versions, self._shares])

    def files_from(self, piece: int) -> set[SourceFile]:
        """The files that this piece and those after it need."""
        return {file for later in self.pieces[piece:] for file in later.files}


def _hold_freed_memory() -> None:
    """Have glibc keep what arrays of a block leave behind, for those of the next one. It gave them back to the kernel
    each time, whose fresh pages took a third of the conversion. The threshold follows the largest block that was freed
    (mallopt(3), M_MMAP_THRESHOLD); other C libraries take no notice."""
    np.empty(HELD_BYTES, dtype=np.uint8)


def _predictor(checkpoint: Checkpoint, quantization: Quantization) -> Predictor | None:
    """What becomes of the source's predictors: as they were trained, and never measured here."""
    if checkpoint.predictors is None:
        return None
    ranks = tuple(map(package_rank, checkpoint.predictors.ranks))
    return Predictor(
        rank=max(ranks),
        quantization=quantization,
        reads="residual",
        sides=(checkpoint.model.trigger,),
        hidden="relu",
        calibration_tokens=0,
        by_layer=(),
        ranks=ranks if len(set(ranks)) > 1 else None,
    )


def _weights_by_encoding(checkpoint: Checkpoint) -> dict[str, int]:
    """How many weights of the matrices the source stores in each encoding, the most first."""
    weights: dict[str, int] = {}
    for part in (part for parts in checkpoint.matrices.values() for part in parts):
        weights[part.encoding] = weights.get(part.encoding, 0) + part.rows * part.columns
    return dict(sorted(weights.items(), key=lambda item: -item[1]))


def _require_groups(checkpoint: Checkpoint, quantization: Quantization) -> None:
    model = checkpoint.model
    source = checkpoint.matrices["embedding"][0].file.path
    for what, columns in (("width", model.width), ("query_heads * head_width", model.query_width)):
        if quantization != "f16" and columns % GROUP_WEIGHTS:
            raise UserError(f"{source}: {what} is {columns}, no multiple of {GROUP_WEIGHTS}, so only f16 is possible")


def _require_gates(model: ModelSpec, quantization: Quantization, gates: Quantization) -> None:
    if not model.gated:
        raise UserError(f"gates in {gates}: this model's feed-forward has no gates")
    if quantization != "q4":
        raise UserError(f"gates in {gates}: only with the rest in q4, and this package is to be {quantization}")


def _blocks(rows: RowNumbers, columns: int, granule: int = 1) -> Iterator[RowNumbers]:
    """Split row numbers into blocks of about BLOCK_BYTES as float32, multiples of `granule` but for the last."""
    count = max(1, BLOCK_BYTES // (4 * columns * granule)) * granule
    for start in range(0, len(rows), count):
        yield rows[start : start + count]


@dataclass
class _Work:
    """One conversion under way. unsaved: weights since its journal was last written."""

    checkpoint: Checkpoint
    manifest: Manifest
    writer: PackageWriter
    progress: Progress
    unsaved: int = 0
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
        """Relative rms error per kind of tensor, |w - w'| / |w|, to four digits: the same for any block size."""
        kinds: Squares = {}
        for name, squares in self.squares.items():
            kind = name.partition(" ")[0]
            kinds[kind] = kinds.get(kind, np.zeros(2)) + squares
        return {kind: _relative(squares) for kind, squares in kinds.items()}

    def worst(self) -> tuple[str, float]:
        """The source's tensor with the largest relative rms error, and that error."""
        errors = {name.partition(" ")[2]: _relative(squares) for name, squares in self.squares.items()}
        name = max(errors, key=lambda name: errors[name])
        return name, errors[name]

    def begin_after(self, pieces: Sequence[Piece], squares: Squares) -> None:
        """These pieces are done, with these sums of squares."""
        written = {name for piece in pieces for name in (*piece.vectors, *piece.matrices)}
        written |= {name for piece in pieces for ffn in self._ffns(piece) for name in self._predictor_names(ffn)}
        self.writer.go_on(
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
        """One piece: what of it is fixed, then its neurons."""
        for name in piece.vectors:
            if not name.endswith(".up.bias"):  # in the order of the neurons, with them
                parts = self.checkpoint.vectors[name]
                self.writer.vector(name, np.concatenate([part.vector() for part in parts]))
        for name in piece.matrices:
            kind = name if name in ("embedding", "output") else "attention"
            for part in self._matrices[name]:
                for rows in _blocks(np.arange(part.rows), part.columns):
                    self.writer.matrix(name, self._rows(kind, part, rows))
        for expert, order in enumerate(piece.orders):
            self._neurons(piece.layer, expert, order)
        for ffn, order in zip(self._ffns(piece), piece.orders, strict=True):
            self._predictor(ffn, order)

    def _ffns(self, piece: Piece) -> range:
        """The numbers of a piece's feed-forwards."""
        experts = self.manifest.model.experts
        return range(0) if piece.layer is None else range(piece.layer * experts, (piece.layer + 1) * experts)

    def _predictor_weights(self, ffn: int) -> int:
        """How many there are of a feed-forward in the package."""
        model, predictor = self.manifest.model, self.manifest.predictor
        return 0 if predictor is None else predictor.rank_of(ffn) * (model.width + model.neurons)

    def _predictor_names(self, ffn: int) -> tuple[str, str, str]:
        """What a package calls a predictor's tensors: of fc1, of fc2, of its bias."""
        model = self.manifest.model
        name = predictor_name(model, *divmod(ffn, model.experts))
        return f"{name}.input", f"{name}.{model.trigger}", f"{name}.{model.trigger}.bias"

    def _predictor(self, ffn: int, order: RowNumbers) -> None:
        """The predictor of one feed-forward, if the source has some, filled up with zeros to whole groups."""
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
            self.writer.predictor_matrix(inner, self._encode("predictor", first, values))
        for rows in _blocks(order, second.columns):
            values = np.pad(second.values(rows), ((0, 0), (0, missing)))
            self.writer.predictor_matrix(side, self._encode("predictor", second, values))

    def _ffn(self, layer: int | None, expert: int) -> dict[str, str]:
        """The names of a feed-forward's matrices, by matrix."""
        model = self.manifest.model
        return {matrix: ffn_name(model, f"layers.{layer}", expert, matrix) for matrix in model.ffn_matrices}

    def _neurons(self, layer: int | None, expert: int, order: RowNumbers) -> None:
        """The neurons of one feed-forward in the given order."""
        if (name := f"layers.{layer}.up.bias") in self.checkpoint.vectors:
            self.writer.vector(name, self.checkpoint.vectors[name][0].vector()[order])
        rows_of = {matrix: self._matrices[name][0] for matrix, name in self._ffn(layer, expert).items()}
        if self.checkpoint.down_by_neuron:
            for rows in _blocks(order, self.manifest.model.width, self.manifest.layout.cluster_neurons):
                self.writer.neurons(*(self._rows(name, matrix, rows) for name, matrix in rows_of.items()))
            return
        down = rows_of.pop("down")
        granule = self.manifest.layout.cluster_neurons
        slab_neurons = max(1, self._slab_bytes // (4 * down.rows * granule)) * granule
        for start in range(0, len(order), slab_neurons):
            neurons = order[start : start + slab_neurons]
            columns = _transposed(down, neurons)
            done = 0
            for rows in _blocks(neurons, self.manifest.model.width, granule):
                self.writer.neurons(
                    *(self._rows(name, matrix, rows) for name, matrix in rows_of.items()),
                    self._encode("down", down, columns[done : done + len(rows)]),
                )
                done += len(rows)

    def _quantization(self, kind: str) -> Quantization:
        return self.manifest.trigger_quantization if kind == "gate" else self.manifest.quantization

    def _rows(self, kind: str, matrix: StoredMatrix, rows: RowNumbers) -> Rows:
        """Encode some rows, without a detour when they are stored in the package's own encoding."""
        stored = matrix.stored(rows)
        same = same_encoding(matrix.encoding, self._quantization(kind), stored)
        if same is None:
            return self._encode(kind, matrix, matrix.checked(decode_stored(matrix.encoding, stored)))
        values = matrix.checked(decode_stored(matrix.encoding, stored))
        self._count(kind, matrix, values, values)
        return same

    def _encode(self, kind: str, matrix: StoredMatrix, values: NDArray[np.float32]) -> Rows:
        try:
            rows = encode(self._quantization(kind), values)
        except OverflowError:
            raise UserError(f"{matrix.file.path}: {matrix.name}: values too large for fp16: damaged") from None
        self._count(kind, matrix, values, decode(self._quantization(kind), rows))
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
    """The root of error over weight, to four digits."""
    error, weight = squares
    return float(f"{np.sqrt(error / weight) if weight else 0.0:.4g}")


def _transposed(down: StoredMatrix, neurons: RowNumbers) -> NDArray[np.float32]:
    """Columns of Down as rows: float32 [len(neurons), width], read row by row."""
    columns = np.empty((len(neurons), down.rows), dtype=np.float32)
    for rows in _blocks(np.arange(down.rows), down.columns):
        columns[:, rows[0] : rows[-1] + 1] = down.values(rows)[:, neurons].T
    return columns
