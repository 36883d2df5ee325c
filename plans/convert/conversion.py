"""The conversion of a checkpoint to a package, in blocks of rows, so that it needs little memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from neuronpipe.plans.convert.block_conversion import Progress, Work
from neuronpipe.plans.convert.chat_template import ExamineTemplate
from neuronpipe.plans.convert.checkpoint import Checkpoint, Options, ffn_name
from neuronpipe.plans.convert.checkpoint_pieces import pieces_of, read_frequencies
from neuronpipe.plans.convert.encodings import PLAIN_BYTES
from neuronpipe.plans.convert.end_tokens import EndToken
from neuronpipe.plans.convert.experts_in_place import ExpertsInPlace
from neuronpipe.plans.convert.gguf.gguf_model import open_gguf
from neuronpipe.plans.convert.huggingface import open_huggingface
from neuronpipe.plans.convert.importance import Importance
from neuronpipe.plans.convert.journal import Done, Journal
from neuronpipe.plans.convert.refusals import refuse_no_source
from neuronpipe.plans.convert.source_file import SourceFile
from neuronpipe.plans.convert.stored_tensors import StoredMatrix
from neuronpipe.plans.gguf_part_names import gguf_file
from neuronpipe.plans.models.spec import Activation, ModelSpec
from neuronpipe.plans.package.layout import (
    CODEBOOK_QUANTIZATIONS,
    GROUP_WEIGHTS,
    MINIMUM_QUANTIZATIONS,
    Layout,
    NeuronOrder,
    Quantization,
)
from neuronpipe.plans.package.manifest import (
    EMBEDDINGS,
    PREDICTOR_QUANTIZATIONS,
    Chat,
    Manifest,
    Predictor,
    package_rank,
)
from neuronpipe.plans.package.model_layout import layout_of_model, slices_of_model
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.tensors import fixed_matrices, row_lengths
from neuronpipe.plans.package.writer import PackageWriter, package_bytes
from neuronpipe.plans.quantization_choice import (
    BITS_CHOICES,
    Choice,
    Recipe,
    RequestedQuantization,
    attention_quantization,
    default_quantization,
    ends_quantization,
    kept_quantization,
    recipe_for,
    why,
)
from neuronpipe.plans.strict_json import one_line
from neuronpipe.protocol.errors import UserError
from numpy.typing import NDArray

WEIGHED: tuple[Quantization, ...] = (*MINIMUM_QUANTIZATIONS, *CODEBOOK_QUANTIZATIONS)
"""Quantizations whose encoding uses the importance of columns."""
PACKAGE_PLACE = "package"  # folder of the unfinished package in the `place` of Conversion.write
RETAINED_BYTES = 8 << 20  # half of the free memory that the C library may retain
MAX_UNSAVED_WEIGHTS = 1 << 27  # after a kill, at most this number and the weights of one piece are converted again


class Encoded(NamedTuple):
    """Facts about a complete conversion.

    source_weights: the source's encoding -> number of weights, most frequent first
    worst_tensor: the source's tensor with the largest error
    worst_error: |w - w'| / |w| of that tensor, where w are the values that the source stores
    notes: what the user should know about the package
    """

    source_weights: Mapping[str, int]
    worst_tensor: str
    worst_error: float
    ends: tuple[EndToken, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def source_was_quantized(self) -> bool:
        return not set(self.source_weights) <= set(PLAIN_BYTES)


MeasureImportance = Callable[[Checkpoint], Importance]
"""Measures or reads the importance of the columns of a checkpoint's matrices."""

Report = Callable[[Encoded], None]
"""Is called once, when the package is published."""


def convert(
    source: Path,
    target: Path,
    *,
    quantization: RequestedQuantization | None = None,
    gates: Quantization | None = None,
    by_neuron: bool = False,
    activation: Activation | None = None,
    frequencies: Path | None = None,
    tokenizer: Path | None = None,
    context_tokens: int | None = None,
    chat_template: Path | None = None,
    name: str | None = None,
    predictor: bool = True,
    examine_template: ExamineTemplate | None = None,
    overwrite: bool = False,
    importance: MeasureImportance | None = None,
    chosen: Callable[[Choice], None] | None = None,
    progress: Progress | None = None,
    report: Report | None = None,
) -> Package:
    """Convert a Hugging Face directory or a GGUF file into a package, and return it.

    quantization: a number selects the quantization whose package is nearest to that many bits per weight; None selects
        it by the encodings of the source
    gates: "q3", in a package of q4; None: as the package
    by_neuron: store feed-forwards neuron by neuron, as thresholded mode needs them, also if all neurons fire
    activation, tokenizer, context_tokens, chat_template, name: override the source
    frequencies: a .npy file of firing shares [layers, experts, neurons], by which neurons are ordered, hot first
    predictor: convert the source's predictors, if it has any
    overwrite: an existing package at `target` may be replaced
    importance: returns the importance by which errors are weighed; None: all columns count equally
    chosen: is called with the choice of quantizations before anything is written

    Configuration, headers and shapes are checked before anything is written. Raises UserError for errors of source,
    target or disk, and leaves no files then. After a kill, the next conversion of the same source continues.
    """
    options = Options(activation, tokenizer, context_tokens, chat_template, predictor, examine_template)
    with open_checkpoint(source, options) as checkpoint:
        conversion = Conversion(
            checkpoint,
            quantization=quantization,
            gates=gates,
            by_neuron=by_neuron,
            frequencies=frequencies,
            name=name,
        )
        if chosen is not None:
            chosen(conversion.choice)
        return conversion.write(target, overwrite=overwrite, importance=importance, progress=progress, report=report)


def open_checkpoint(path: Path, options: Options) -> Checkpoint:
    """Return the checkpoint at a path. Raises UserError if it cannot be read or is not supported.

    path: a Hugging Face directory, a GGUF file, a part of a GGUF model, or a folder with only the parts of one
    """
    refuse_no_source(path)
    if (file := gguf_file(path)).is_dir():
        return open_huggingface(path, options)
    return open_gguf(file, options)


class Conversion:
    """A planned conversion: everything that is known before the weights are read.

    `pieces` are converted in the order in which most checkpoints store them: the embedding, each layer, the output.
    Each file is thus needed for consecutive pieces, and can be downloaded before and deleted after them. Parameters are
    those of `convert`; raises UserError if they do not fit the checkpoint.

    experts: experts that the package reads in place; their quantization is the package's
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        quantization: RequestedQuantization | None = None,
        gates: Quantization | None = None,
        by_neuron: bool = False,
        frequencies: Path | None = None,
        name: str | None = None,
        experts: ExpertsInPlace | None = None,
    ) -> None:
        model, chat = checkpoint.model, checkpoint.chat_template
        self._by_neuron = by_neuron or checkpoint.predictors is not None or checkpoint.down_by_neuron
        self._source_weights = _weights_by_encoding(chain.from_iterable(checkpoint.matrices.values()))
        default = "q4" if gates else default_quantization(self._source_weights)
        self._experts = experts
        if experts is not None:
            default = experts.quantizations["gate"]
        shares = None if frequencies is None else read_frequencies(frequencies, model)
        self._neuron_order: NeuronOrder = "source" if shares is None else "frequency"
        self.checkpoint = checkpoint
        quantized = not set(self._source_weights) <= set(PLAIN_BYTES)
        self.manifest = Manifest(
            name=one_line(name or checkpoint.source.name),
            source=replace(checkpoint.source, weights=self._source_weights if quantized else {}),
            model=model,
            quantization=default,
            end_tokens=tuple(end.token for end in checkpoint.ends),
            layout=self._layout(default),
            files={},
            quantization_error={},
            chat=None if chat is None else Chat(begin=chat.begin, end=chat.end),
            source_experts=None if experts is None else experts.places,
            fired_by_layer=None if shares is None else _by_layer(shares, model),
        )
        chosen = self._nearest(quantization) if isinstance(quantization, float) else quantization or default
        _require_groups(checkpoint, chosen)
        if gates is not None:
            _require_gates(model, chosen, gates)
        self.manifest = self._manifest_in(chosen, gates)
        self.pieces = pieces_of(checkpoint, shares)
        self._shares = "" if shares is None else hashlib.sha256(shares.tobytes()).hexdigest()

    def _layout(self, quantization: Quantization, gates: Quantization | None = None) -> Layout:
        model = self.checkpoint.model
        if self._experts is not None:
            return self._experts.layout
        by_neuron = self._by_neuron or self._neuron_order != "source" or not slices_of_model(model)
        return layout_of_model(
            model,
            quantization,
            self._neuron_order,
            differing={"gate": gates, "down": self._down_quantization(quantization, by_neuron=by_neuron)},
            by_neuron=by_neuron,
        )

    def _down_quantization(self, quantization: Quantization, *, by_neuron: bool) -> Quantization:
        """Return the quantization of Down: the recipe's, or with Down by output the one that keeps its encoding."""
        checkpoint = self.checkpoint
        recipe = _recipe(checkpoint, quantization)
        if by_neuron or quantization != default_quantization(self._source_weights):
            return recipe.down
        names = [
            ffn_name(checkpoint.model, f"layers.{layer}", expert, "down") for layer, expert in checkpoint.model.places
        ]
        encodings = _weights_by_encoding(part for name in names for part in checkpoint.matrices[name])
        return kept_quantization(encodings) or recipe.down

    @property
    def package_bytes(self) -> int:
        """Size of the package on disk, without its manifest and chat template."""
        return package_bytes(self.manifest) + len(self.checkpoint.tokenizer)

    @property
    def choice(self) -> Choice:
        """The package's quantization and size, and those of an alternative."""
        quantization = self.manifest.quantization
        alternative: Quantization = "q4k" if quantization == "q8" else "q8"
        fits = _fits_groups(self.checkpoint.model)
        return Choice(
            quantization=quantization,
            why=why(self._source_weights, quantization),
            package_bytes=self.package_bytes,
            alternative=alternative if fits and self._experts is None else None,
            alternative_bytes=self._package_bytes_in(alternative) if fits and self._experts is None else 0,
        )

    def _manifest_in(self, quantization: Quantization, gates: Quantization | None = None) -> Manifest:
        return replace(
            self.manifest,
            quantization=quantization,
            quantizations=_fixed_quantizations(self.checkpoint, quantization),
            layout=self._layout(quantization, gates),
            predictor=_predictor(self.checkpoint, quantization),
        )

    def _package_bytes_in(self, quantization: Quantization) -> int:
        return package_bytes(self._manifest_in(quantization)) + len(self.checkpoint.tokenizer)

    def _nearest(self, bits: float) -> Quantization:
        """Return the quantization whose package is nearest to `bits` per weight; f16 if no other fits the model."""
        if not _fits_groups(self.checkpoint.model):
            return "f16"
        weights = sum(self._source_weights.values())
        return min(BITS_CHOICES, key=lambda choice: abs(8 * self._package_bytes_in(choice) / weights - bits))

    def write(
        self,
        target: Path,
        *,
        overwrite: bool,
        importance: MeasureImportance | None = None,
        progress: Progress | None = None,
        report: Report | None = None,
        place: Path | None = None,
    ) -> Package:
        """Convert, publish the package as `target`, and return it. Raises UserError as `convert`.

        place: a folder on the disk of `target`. Unfinished work stays there after errors, and is continued if it is of
            the same package. None: work stays only after a kill, beside `target`.
        """
        columns = None if importance is None else self._importance(importance)
        if columns is not None:
            source = replace(self.manifest.source, importance=one_line(columns.origin))
            self.manifest = replace(self.manifest, source=source)
        _retain_freed_memory()
        with PackageWriter(
            target,
            self.manifest,
            overwrite=overwrite,
            place=None if place is None else place / PACKAGE_PLACE,
            can_resume=lambda folder: self._journal(folder, columns).read().pieces > 0,
        ) as writer:
            work = Work(self.checkpoint, self.manifest, writer, progress or (lambda done, total: None), columns)
            journal = self._journal(writer.path, columns)
            done = journal.read()
            work.begin_after(self.pieces[: done.pieces], done.squares)
            for number, piece in enumerate(self.pieces[done.pieces :], done.pieces):
                for file in piece.files:
                    file.fetch()
                work.do(piece)
                leaving = set(piece.files) - self.files_from(number + 1)
                if leaving or work.unsaved >= MAX_UNSAVED_WEIGHTS:
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
            notes = [*self.checkpoint.notes]
            if columns is not None and not work.weighed:
                notes.append(f"{columns.origin} changed nothing: all values that it could weigh are the source's own")
            report(Encoded(self._source_weights, *work.worst(), self.checkpoint.ends, tuple(notes)))
        return package

    def _importance(self, measure: MeasureImportance) -> Importance:
        if (quantization := self.manifest.quantization) not in WEIGHED:
            raise UserError(f"quantization {quantization} does not weigh errors by importance; {', '.join(WEIGHED)} do")
        return measure(self.checkpoint)

    def pieces_done(self, place: Path) -> int:
        """Return the number of pieces that unfinished work in `place` has done."""
        return self._journal(place / PACKAGE_PLACE).read().pieces

    def _journal(self, folder: Path, importance: Importance | None = None) -> Journal:
        """Return the journal of the work in a folder. It is valid only for the same package of unchanged sources."""
        versions = sorted(file.version for file in self.files_from(0))
        digests = [self._shares] if importance is None else [self._shares, importance.digest]
        return Journal(folder, self.manifest, [*versions, *digests])

    def files_from(self, piece: int) -> set[SourceFile]:
        """Return the files that the pieces from number `piece` on need."""
        return {file for later in self.pieces[piece:] for file in later.files}


def _retain_freed_memory() -> None:
    """Make glibc retain the memory of a block's arrays for the next block.

    Otherwise it returns the memory to the kernel, and fresh pages take a third of the time of a conversion. Freeing a
    large array raises the thresholds (mallopt(3), M_MMAP_THRESHOLD).
    """
    np.empty(RETAINED_BYTES, dtype=np.uint8)


def _predictor(checkpoint: Checkpoint, quantization: Quantization) -> Predictor | None:
    if checkpoint.predictors is None:
        return None
    ranks = tuple(map(package_rank, checkpoint.predictors.ranks))
    return Predictor(
        rank=max(ranks),
        quantization=quantization if quantization in PREDICTOR_QUANTIZATIONS else "q4",
        reads="residual",
        sides=(checkpoint.model.trigger,),
        hidden="relu",
        calibration_tokens=0,
        by_layer=(),
        ranks=ranks if len(set(ranks)) > 1 else None,
    )


def _recipe(checkpoint: Checkpoint, quantization: Quantization) -> Recipe:
    weights = _weights_by_encoding(chain.from_iterable(checkpoint.matrices.values()))
    return recipe_for(quantization, weights, down_by_neuron=checkpoint.down_by_neuron)


def _fixed_quantizations(checkpoint: Checkpoint, quantization: Quantization) -> dict[str, Quantization]:
    """Return the quantizations of the fixed matrices that differ from the package's.

    Embedding and output follow the recipe, or a smaller quantization that suffices. An attention matrix has more bits
    than the package's if the source stores it in an encoding that needs them.
    """
    quantizations = {}
    recipe = _recipe(checkpoint, quantization)
    weights = _weights_by_encoding(chain.from_iterable(checkpoint.matrices.values()))
    for name, _, _ in fixed_matrices(checkpoint.model):
        encodings = _weights_by_encoding(checkpoint.matrices[name])
        if name in EMBEDDINGS:
            is_looked_up = name == "embedding" and not checkpoint.model.tied_embeddings
            is_default = quantization == default_quantization(weights)
            of_matrix = ends_quantization(
                quantization, recipe, encodings, is_looked_up=is_looked_up, is_default=is_default
            )
        else:
            may_differ = quantization != "f16" and checkpoint.model.all_neurons_fire
            of_matrix = attention_quantization(quantization, weights, encodings, may_differ=may_differ)
        if of_matrix != quantization:
            quantizations[name] = of_matrix
    return quantizations


def _weights_by_encoding(parts: Iterable[StoredMatrix]) -> dict[str, int]:
    weights: dict[str, int] = {}
    for part in parts:
        weights[part.encoding] = weights.get(part.encoding, 0) + part.rows * part.columns
    return dict(sorted(weights.items(), key=lambda item: -item[1]))


def _fits_groups(model: ModelSpec) -> bool:
    return not any(columns % GROUP_WEIGHTS for columns in row_lengths(model).values())


def _require_groups(checkpoint: Checkpoint, quantization: Quantization) -> None:
    model = checkpoint.model
    source = checkpoint.matrices["embedding"][0].file.path
    for what, columns in row_lengths(model).items():
        if quantization != "f16" and columns % GROUP_WEIGHTS:
            raise UserError(f"{source}: {what} is {columns}, no multiple of {GROUP_WEIGHTS}, so only f16 is possible")


def _require_gates(model: ModelSpec, quantization: Quantization, gates: Quantization) -> None:
    if not model.gated:
        raise UserError(f"gates in {gates}: this model's feed-forward has no gates")
    if quantization != "q4":
        raise UserError(f"gates in {gates}: only with the rest in q4, and this package is to be {quantization}")


def _by_layer(shares: NDArray[np.float32], model: ModelSpec) -> tuple[float, ...]:
    """Return the mean firing share of the neurons of each layer; 0 without any. shares: as `read_frequencies` returns
    them"""
    ffns = map(model.ffns_of, range(model.layers))
    return tuple(float(shares[part.start : part.stop].mean()) if part else 0.0 for part in ffns)
