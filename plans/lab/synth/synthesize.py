"""Synthesis of a package, layer by layer. Each layer is calibrated on the outputs of the layers before it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
from neuronpipe.plans.convert.quantize import decode, encode
from neuronpipe.plans.lab.synth import codes
from neuronpipe.plans.lab.synth.activation_rates import active_shares, requested_by_layer
from neuronpipe.plans.lab.synth.attention import ATTENTION_POWER, AttentionMaker
from neuronpipe.plans.lab.synth.neurons import FEED_FORWARD_POWER, Firing, LayerInput, NeuronMaker, Neurons, Pending
from neuronpipe.plans.lab.synth.prediction import Prediction, PredictorShape
from neuronpipe.plans.lab.synth.recurrent import RecurrentMaker
from neuronpipe.plans.lab.synth.routing import make_router
from neuronpipe.plans.lab.synth.shapes import coordinates, rank_of, rope_frequencies
from neuronpipe.plans.lab.synth.tokens import (
    STATE_POWER,
    CalibrationSequences,
    Tables,
    calibration_sequences,
    preset_tables,
    tokenizer_json,
    unused_tables,
    workload,
)
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.layout import GROUP_WEIGHTS, NeuronOrder, Quantization
from neuronpipe.plans.package.manifest import (
    Manifest,
    Predictor,
    PredictorInput,
    PredictorQuality,
    Source,
    Workload,
)
from neuronpipe.plans.package.model_layout import layout_of_model
from neuronpipe.plans.package.predictor_writer import FiringShares, write_predictor
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.tensors import DRAFT_INPUT, fixed_vectors, recurrent_vectors
from neuronpipe.plans.package.writer import PackageWriter, Rows
from neuronpipe.plans.reference.attention import layer_norm, rms_norm
from numpy.typing import NDArray

PREDICTOR_RECALL = 0.97
OUTPUT_NORMS = {
    "attention_output_norm": float(np.sqrt(ATTENTION_POWER * STATE_POWER)),
    "ffn_output_norm": float(np.sqrt(FEED_FORWARD_POWER * STATE_POWER)),
}
BLOCK_NEURONS = 512
MAX_AHEAD_NEURONS = 4096  # of the next experts, so that every core has work if experts have few blocks

Array = NDArray[np.float32]
Progress = Callable[[int, int], None]


def synthesize(
    name: str,
    model: ModelSpec,
    target: Path,
    *,
    seed: int = 0,
    reads: PredictorInput = "attention",
    predictor_quantization: Quantization = "q4",
    gates: Quantization | None = None,
    by_neuron: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Package:
    """Write a package of a shape, with predictors if its activation is dReLU, and return it. Raises UserError for
    errors of the file system.

    reads: input of the predictors; those of a mixture always read "feed_forward"
    gates: quantization of gates; None: that of the other matrices
    by_neuron: see `layout_of_model`
    progress: receives the bytes of neurons that are written, and all bytes of neurons
    """
    if model.experts > 1:
        reads = "feed_forward"
    places, work = coordinates(model.width), workload(model, seed)
    order: NeuronOrder = "source" if model.all_neurons_fire else "frequency"
    layout = layout_of_model(model, "q4", order, differing={"gate": gates}, by_neuron=by_neuron)
    manifest = Manifest(
        name=name, source=Source("synthetic", name, model.activation), model=model, quantization="q4", end_tokens=(),
        layout=layout, files={}, quantization_error={}, fired_by_layer=None, workload=work,
    )  # fmt: skip
    frequencies = rope_frequencies(model), rope_frequencies(model, is_local=True) if any(model.local_layers) else None
    sequences = calibration_sequences(work)
    norm_weights = np.ones(model.width, dtype=np.float32)
    shape = PredictorShape(rank_of(model.width), predictor_quantization) if model.activation == "drelu" else None
    requested = requested_by_layer(model, seed)
    with (
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        PackageWriter(target, manifest, overwrite=overwrite) as writer,
        _Finisher(writer, manifest, progress) as finisher,
    ):
        writer.vector("rope.inverse_frequency", frequencies[0])
        if frequencies[1] is not None:
            writer.vector("rope.local_inverse_frequency", frequencies[1])
        x = _write_tables(
            writer, model, work, sequences, pool.map(partial(_tables, model, work), [*work.presets, None])
        )
        writer.vector("output_norm", norm_weights)
        for vector, length in fixed_vectors(model):
            if vector in ("output_norm.bias", "output.bias"):
                writer.vector(vector, np.zeros(length, dtype=np.float32))
        attention = AttentionMaker(model, places, frequencies, sequences, seed, pool)
        recurrent = RecurrentMaker(model, places, sequences, seed, pool)
        granule = GROUP_WEIGHTS if layout.down_by_output else layout.cluster_neurons
        maker = NeuronMaker(
            model,
            places,
            sequences,
            BLOCK_NEURONS // granule * granule,
            seed,
            pool,
            gates or "q4",
            slices=layout.slices if layout.down_by_output else 0,
        )
        routed_before: Array | None = None
        for layer in range(model.layers):
            prefix, layer_input = f"layers.{layer}", x
            before = _normed(model, x)
            change = _write_mixer(writer, model, layer, attention, recurrent, before)
            if layer >= model.text_layers:  # from the embedding alone the next token of a walk follows
                embedding = np.eye(model.width, 2 * model.width, dtype=np.float32)
                writer.matrix(f"{prefix}.{DRAFT_INPUT}", encode("q4", embedding))
            of_mixer = recurrent_vectors(model, layer)
            for vector, length in fixed_vectors(model):
                if not vector.startswith(f"{prefix}.") or vector.removeprefix(f"{prefix}.") in of_mixer:
                    continue
                if vector.endswith((".bias", ".sinks", ".choosing_bias", ".shared_gate")):
                    writer.vector(vector, np.zeros(length, dtype=np.float32))
                elif vector.endswith((".query_norm", ".key_norm")):
                    writer.vector(vector, np.resize(attention.head_norm(layer), length))
                elif not vector.endswith(".router"):
                    weight = OUTPUT_NORMS.get(vector.removeprefix(f"{prefix}."), 1.0)
                    writer.vector(vector, np.full(length, weight, dtype=np.float32))
            x = x + _normed_output(model, "attention_output_norm", change)
            normed = _normed(model, x)
            always_active = model.expert_counts[layer] - model.routed_experts(layer)
            routed = np.full((len(x), always_active), 0.5 if model.shared_gate else 1.0, dtype=np.float32)
            if model.routed_experts(layer):
                read = layer_input if model.router_reads == "layer" else normed
                router, shares_of = make_router(model, places, read, routed_before, codes.generator(seed, 4, layer))
                routed, routed_before = np.concatenate((shares_of, routed), axis=1), read
                writer.vector(f"{prefix}.router", router.reshape(-1))
            prediction = None
            if shape is not None:
                predicts_from = before if reads == "attention" else normed
                prediction = Prediction.of_layer(shape, places, normed, predicts_from, sequences.held_out)
            shares = active_shares(layer, model.layers, model.neurons, float(requested[layer]))
            changes = np.zeros((2, *x.shape), dtype=np.float32) if model.norms_after else x[None]
            for expert, neurons in enumerate(
                _experts(maker, model.first_ffns[layer], LayerInput(normed, shares, prediction), routed)
            ):
                parts = routed[neurons.tokens, expert, None] * neurons.change
                branch = int(model.branch_norms and expert < model.routed_experts(layer))
                changes[branch, neurons.tokens, places.feed_forward] += parts
                finisher.take(neurons)
            if model.branch_norms:
                changes = rms_norm(changes, norm_weights, model.norm_epsilon)
            if model.norms_after:
                x = x + _normed_output(model, "ffn_output_norm", changes.sum(axis=0))
        firings = finisher.firings()
        ffns = map(model.ffns_of, range(model.layers))
        by_layer = [firings[of_layer.start : of_layer.stop] for of_layer in ffns]
        firing_shares = FiringShares(
            tuple(_mean(each.activity for each in layer) for layer in by_layer),
            tuple(_mean(each.fired for each in layer) for layer in by_layer),
        )
        package = writer.complete(
            tokenizer_json(work, model.vocabulary),
            {},
            fired_by_layer=firing_shares.fired_by_layer,
            trigger_fired_by_layer=firing_shares.trigger_fired_by_layer,
        )
        if shape is not None:
            predictor = Predictor(
                shape.rank, shape.quantization, reads, ("gate",), "none", int((~sequences.held_out).sum()),
                tuple(map(_mean_quality, by_layer)),
            )  # fmt: skip
            write_predictor(
                package, predictor, [each.factors for each in firings if each.factors is not None], firing_shares
            )
        return writer.publish()


def _normed(model: ModelSpec, x: Array) -> Array:
    """Return what a layer's part reads."""
    weights = np.ones(model.width, dtype=np.float32)
    if model.norm == "layer":
        return layer_norm(x, weights, np.zeros(model.width, dtype=np.float32), model.norm_epsilon)
    return rms_norm(x, weights, model.norm_epsilon)


def _normed_output(model: ModelSpec, name: str, change: Array) -> Array:
    """Return what a layer adds to the residual stream. name: of the norm of outputs, if the model has it"""
    weights = np.full(model.width, OUTPUT_NORMS[name], dtype=np.float32)
    return rms_norm(change, weights, model.norm_epsilon) if model.norms_after else change


def _write_mixer(
    writer: PackageWriter,
    model: ModelSpec,
    layer: int,
    attention: AttentionMaker,
    recurrent: RecurrentMaker,
    normed: Array,
) -> Array:
    """Write the matrices of a layer's mixer, and the vectors of a recurrent one, and return what it adds."""
    maker = attention if model.mixers[layer] == "attention" else recurrent
    mixer = maker.layer(layer, normed)
    for name, rows in mixer.matrices.items():
        writer.matrix(f"layers.{layer}.{name}", rows)
    for name, values in mixer.vectors.items():
        writer.vector(f"layers.{layer}.{name}", values)
    return mixer.change


def _experts(maker: NeuronMaker, first_ffn: int, read: LayerInput, routed: Array) -> Iterator[Neurons]:
    """Yield a layer's feed-forwards in order, while the next experts, up to MAX_AHEAD_NEURONS, are computed.

    routed: shares of the experts [tokens, experts]
    """
    pending: deque[Pending] = deque()
    ahead = MAX_AHEAD_NEURONS // len(read.shares)
    for expert in range(routed.shape[1]):
        pending.append(maker.begin(first_ffn + expert, read, routed[:, expert] > 0))
        if len(pending) > ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


class _Finisher:
    """Writes feed-forwards in a thread, and collects their activation statistics."""

    def __init__(self, writer: PackageWriter, manifest: Manifest, progress: Progress | None) -> None:
        self._writer, self._progress = writer, progress
        self._ffn_bytes = manifest.layout.clusters * manifest.layout.cluster_stride_bytes
        self._ffns = manifest.model.ffns
        self._pool = ThreadPoolExecutor(1)
        self._next: Future[Firing] | None = None
        self._firings: list[Firing] = []

    def __enter__(self) -> _Finisher:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def take(self, neurons: Neurons) -> None:
        """Start to write a feed-forward, after the one before is written."""
        self._wait()
        self._next = self._pool.submit(self._finish, neurons)

    def firings(self) -> list[Firing]:
        self._wait()
        return self._firings

    def _finish(self, neurons: Neurons) -> Firing:
        for rows in neurons.rows():
            self._writer.neurons(*rows)
        return neurons.firing(PREDICTOR_RECALL)

    def _wait(self) -> None:
        if self._next is None:
            return
        self._firings.append(self._next.result())
        self._next = None
        if self._progress is not None:
            self._progress(len(self._firings) * self._ffn_bytes, self._ffns * self._ffn_bytes)


def _mean(values: Iterable[float]) -> float:
    """Return the mean; 0 of a layer without a feed-forward."""
    numbers = tuple(values)
    return round(fmean(numbers), 6) if numbers else 0.0


def _mean_quality(layer: list[Firing]) -> PredictorQuality:
    names = ("recall", "precision", "predicted")
    return PredictorQuality(*(_mean(getattr(firing.quality, name) for firing in layer) for name in names))


def _tables(model: ModelSpec, work: Workload, preset: str | None) -> Tables:
    places = coordinates(model.width)
    if preset is None:
        return unused_tables(model, places, model.vocabulary - sum(count for _, count in work.presets.values()))
    first, count = work.presets[preset]
    return preset_tables(model, places, preset, count, codes.generator(work.seed, 0, first))


def _write_tables(
    writer: PackageWriter, model: ModelSpec, work: Workload, sequences: CalibrationSequences, tables: Iterable[Tables]
) -> Array:
    ids, first = np.concatenate([np.asarray(sequence) for sequence in sequences.ids]), 0
    rows = np.empty((len(ids), model.width), dtype=np.float32)
    for table in tables:
        writer.matrix("embedding", table.embedding)
        writer.matrix("output", table.output)
        in_table = (ids >= first) & (ids < first + len(table.embedding.quants))
        if in_table.any():
            places = ids[in_table] - first
            rows[in_table] = decode("q4", Rows(table.embedding.quants[places], table.embedding.scales[places]))
        first += len(table.embedding.quants)
    return rows
