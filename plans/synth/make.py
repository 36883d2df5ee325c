"""Making a synthetic package: layer after layer, each on what the layers before it made of the calibration tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
from neuronpipe.plans.convert.quantize import decode
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.layout import Quantization, compute_layout
from neuronpipe.plans.package.manifest import (
    Manifest,
    Predictor,
    PredictorInput,
    PredictorQuality,
    Source,
    Workload,
)
from neuronpipe.plans.package.predictor_writer import FiringShares, write_predictor
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.writer import PackageWriter, Rows
from neuronpipe.plans.reference.engine import rms_norm
from neuronpipe.plans.synth import codes
from neuronpipe.plans.synth.firing import active_shares, firing_by_layer
from neuronpipe.plans.synth.layer import Found, LayerMaker, Neurons, PredictorShape, Texts
from neuronpipe.plans.synth.shapes import coordinates, rank_of
from neuronpipe.plans.synth.tokens import (
    Tables,
    preset_tables,
    tokenizer_json,
    unused_tables,
    workload,
)
from numpy.typing import NDArray

ROPE_BASE = 10_000.0
TEXT_TOKENS = 96
INDEPENDENT_TEXTS = 4  # beside one of every other preset
HELD_OUT_PART = 4
PREDICTOR_RECALL = 0.97
BLOCK_NEURONS = 512

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
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Package:
    """Write a package of this shape with its predictor. progress is called with bytes of neurons written and all of
    them. reads: of a mixture's predictors always "feed_forward". Raises UserError for what the disk refuses."""
    if model.experts > 1:
        reads = "feed_forward"
    places, work = coordinates(model.width), workload(model, seed)
    requested = firing_by_layer(model.layers, np.random.default_rng(seed))
    layout = compute_layout(
        "q4", model.width, model.neurons, model.ffn_matrices, "frequency", read_whole=model.read_whole
    )
    manifest = Manifest(
        name=name, source=Source("synthetic", name, "drelu"), model=model, quantization="q4", end_tokens=(),
        layout=layout, files={}, quantization_error={}, fired_by_layer=None, workload=work,
    )  # fmt: skip
    frequency = (ROPE_BASE ** (-np.arange(0, model.head_width, 2) / model.head_width)).astype(np.float32)
    texts = _calibration_texts(work)
    made: list[Found] = []

    def finish(neurons: Neurons) -> Found:
        for rows in neurons.rows():
            writer.neurons(*rows)
        return neurons.found(PREDICTOR_RECALL)

    def finished(found: Found) -> None:
        made.append(found)
        if progress is not None:
            ffn_bytes = layout.clusters * layout.cluster_stride_bytes
            progress(len(made) * ffn_bytes, model.ffns * ffn_bytes)

    with (
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        ThreadPoolExecutor(1) as finisher,
        PackageWriter(target, manifest, overwrite=overwrite) as writer,
    ):
        writer.vector("rope.inverse_frequency", frequency)
        x = _write_tables(writer, model, work, texts, pool.map(partial(_tables, model, work), [*work.presets, None]))
        ones = np.ones(model.width, dtype=np.float32)
        writer.vector("output_norm", ones)
        shape = PredictorShape(rank_of(model.width), predictor_quantization)
        block_neurons = BLOCK_NEURONS // layout.cluster_neurons * layout.cluster_neurons
        maker = LayerMaker(model, places, frequency, texts, shape, block_neurons, seed, pool)
        finishing: Future[Found] | None = None
        for layer in range(model.layers):
            prefix = f"layers.{layer}"
            for vector in ("attention_norm", "ffn_norm"):
                writer.vector(f"{prefix}.{vector}", ones)
            before = rms_norm(x, ones, model.norm_epsilon)
            qkv, attention_output, change = maker.attention(layer, before)
            writer.matrix(f"{prefix}.qkv", qkv)
            writer.matrix(f"{prefix}.attention_output", attention_output)
            x = x + change
            normed = rms_norm(x, ones, model.norm_epsilon)
            shares = active_shares(layer, model.layers, model.neurons, float(requested[layer]))
            routed = np.ones((len(x), 1), dtype=np.float32)
            if model.experts > 1:
                router, routed = maker.router(layer, normed)
                writer.vector(f"{prefix}.router", router.reshape(-1))
            for expert in range(model.experts):
                ffn, read = layer * model.experts + expert, before if reads == "attention" else normed
                neurons, change = maker.neurons(ffn, normed, read, shares)
                x = x + routed[:, expert, None] * change
                if finishing is not None:
                    finished(finishing.result())
                finishing = finisher.submit(finish, neurons)
                del neurons
        if finishing is not None:
            finished(finishing.result())
        package = writer.complete(tokenizer_json(work, model.vocabulary), {})
        by_layer = [made[first : first + model.experts] for first in range(0, model.ffns, model.experts)]
        predictor = Predictor(
            shape.rank, predictor_quantization, reads, ("gate",), "none", int((~texts.held_out).sum()),
            tuple(map(_mean_quality, by_layer)),
        )  # fmt: skip
        firing = FiringShares(
            tuple(_mean(found.activity for found in layer) for layer in by_layer),
            tuple(_mean(found.fired for found in layer) for layer in by_layer),
        )
        write_predictor(package, predictor, [found.factors for found in made], firing)
        return writer.publish()


def _mean(values: Iterable[float]) -> float:
    return round(fmean(values), 6)


def _mean_quality(layer: list[Found]) -> PredictorQuality:
    """Of the predictors of a layer's experts."""
    names = ("recall", "precision", "predicted")
    return PredictorQuality(*(_mean(getattr(found.quality, name) for found in layer) for name in names))


def _calibration_texts(work: Workload) -> Texts:
    """Texts of one length: one of each preset, the last, independent one, several."""
    tokens = min(TEXT_TOKENS, min(count for _, count in work.presets.values()) // INDEPENDENT_TEXTS)
    firsts = [first for first, _ in work.presets.values()]
    firsts += [firsts[-1] + number * tokens for number in range(1, INDEPENDENT_TEXTS)]
    ids = tuple(range(first, first + tokens) for first in firsts)
    held_out = np.tile(np.arange(tokens) >= tokens - tokens // HELD_OUT_PART, len(ids))
    return Texts(ids, slice(len(held_out) - INDEPENDENT_TEXTS * tokens, len(held_out)), held_out)


def _tables(model: ModelSpec, work: Workload, preset: str | None) -> Tables:
    """Of one preset's tokens; without a preset, of those that are left."""
    places = coordinates(model.width)
    if preset is None:
        return unused_tables(model, places, model.vocabulary - sum(count for _, count in work.presets.values()))
    first, count = work.presets[preset]
    return preset_tables(model, places, preset, count, codes.generator(work.seed, 0, first))


def _write_tables(
    writer: PackageWriter, model: ModelSpec, work: Workload, texts: Texts, tables: Iterable[Tables]
) -> Array:
    """Write embedding and output, and return the rows of the calibration tokens."""
    ids, first = np.concatenate([np.asarray(text) for text in texts.ids]), 0
    rows = np.empty((len(ids), model.width), dtype=np.float32)
    for table in tables:
        writer.matrix("embedding", table.embedding)
        writer.matrix("output", table.output)
        own = (ids >= first) & (ids < first + len(table.embedding.quants))
        if own.any():
            places = ids[own] - first
            rows[own] = decode("q4", Rows(table.embedding.quants[places], table.embedding.scales[places]))
        first += len(table.embedding.quants)
    return rows
