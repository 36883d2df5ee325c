"""Making a synthetic package: layer after layer, each on what the layers before it made of the calibration tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from neuronpipe.plans.convert.quantize import decode, encode
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
from neuronpipe.plans.package.predictor_writer import FiringShares, LayerFactors, write_predictor
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.writer import PackageWriter, Rows
from neuronpipe.plans.predictor.fit import Calibration, fit_layer
from neuronpipe.plans.predictor.predictions import judge, predicted_neurons
from neuronpipe.plans.reference.engine import rms_norm
from neuronpipe.plans.synth.firing import active_shares, firing_by_layer
from neuronpipe.plans.synth.layer import Drawn, LayerMaker
from neuronpipe.plans.synth.shapes import coordinates, rank_of
from neuronpipe.plans.synth.tokens import STATE_POWER, embeddings, tokenizer_json, workload
from numpy.typing import NDArray

ROPE_BASE = 10_000.0
TEXT_TOKENS = 384
INDEPENDENT_TEXTS = 2  # beside one of every other preset
HELD_OUT_PART = 4
PREDICTOR_RECALL = 0.97
WRITE_NEURONS = 2048

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
    them. Raises UserError for what the disk refuses."""
    places, work = coordinates(model.width), workload(model, seed)
    random = np.random.default_rng(seed)
    requested = firing_by_layer(model.layers, random)
    layout = compute_layout("q4", model.width, model.neurons, model.ffn_matrices, "frequency")
    manifest = Manifest(
        name=name, source=Source("synthetic", name, "drelu"), model=model, quantization="q4", end_tokens=(),
        layout=layout, files={}, quantization_error={}, fired_by_layer=None, workload=work,
    )  # fmt: skip
    frequency = (ROPE_BASE ** (-np.arange(0, model.head_width, 2) / model.head_width)).astype(np.float32)
    texts = _calibration_texts(work)
    tokens = len(texts[0])
    held_out = np.tile(np.arange(tokens) >= tokens - tokens // HELD_OUT_PART, len(texts))
    independent = slice(len(held_out) - INDEPENDENT_TEXTS * tokens, len(held_out))
    maker = LayerMaker(model, places, frequency, [tokens] * len(texts), independent)
    step = WRITE_NEURONS // layout.cluster_neurons * layout.cluster_neurons
    factors: list[LayerFactors] = []
    quality: list[PredictorQuality] = []
    mean: list[float] = []
    fired: list[float] = []
    with PackageWriter(target, manifest, overwrite=overwrite) as writer:
        writer.vector("rope.inverse_frequency", frequency)
        table, output = embeddings(model, places, work, random)
        encoded = _write_table(writer, "embedding", table)
        _write_table(writer, "output", output)
        ids = np.concatenate([np.asarray(text) for text in texts])
        x = decode("q4", Rows(encoded.quants[ids], encoded.scales[ids]))
        del table, output, encoded
        ones = np.ones(model.width, dtype=np.float32)
        writer.vector("output_norm", ones)
        state_power = STATE_POWER * model.width
        for layer in range(model.layers):
            prefix = f"layers.{layer}"
            for vector in ("attention_norm", "ffn_norm"):
                writer.vector(f"{prefix}.{vector}", ones)
            before = rms_norm(x, ones, model.norm_epsilon)
            qkv, attention_output, change = maker.attention(before, state_power, random)
            writer.matrix(f"{prefix}.qkv", qkv)
            writer.matrix(f"{prefix}.attention_output", attention_output)
            x = x + change
            normed = rms_norm(x, ones, model.norm_epsilon)
            shares = active_shares(layer, model.layers, model.neurons, float(requested[layer]))
            gate, up = maker.gate_and_up(normed, shares, random)
            inner = np.maximum(gate.values, 0) * np.maximum(up.values, 0)
            active = inner != 0
            mean.append(round(float(active.mean()), 6))
            fired.append(round(float((gate.values > 0).mean()), 6))
            down, change = maker.down(inner, state_power, random)
            del inner
            for start in range(
                0, model.neurons, step := WRITE_NEURONS // layout.cluster_neurons * layout.cluster_neurons
            ):
                some = slice(start, start + step)
                writer.neurons(*(Rows(r.quants[some], r.scales[some]) for r in (gate.rows, up.rows, down)))
                if progress is not None:
                    written = layer * model.neurons + min(start + step, model.neurons)
                    stride = layout.cluster_stride_bytes / layout.cluster_neurons
                    progress(int(written * stride), int(model.layers * model.neurons * stride))
            read = before if reads == "attention" else normed
            fitted = _fit(gate, read, normed, active, ~held_out, rank_of(model.width), predictor_quantization)
            predicted = predicted_neurons(predictor_quantization, fitted, "none", read[held_out])
            factors.append(fitted)
            quality.append(judge(predicted, active[held_out]))
            x = x + change
        package = writer.complete(tokenizer_json(work, model.vocabulary), {})
        calibrated = int((~held_out).sum())
        predictor = Predictor(
            rank_of(model.width), predictor_quantization, reads, ("gate",), "none", calibrated, tuple(quality)
        )
        write_predictor(package, predictor, factors, FiringShares(tuple(mean), tuple(fired)))
        return writer.publish()


def _calibration_texts(work: Workload) -> list[range]:
    """Texts of one length: one of each preset, the last, independent one, several."""
    tokens = min(TEXT_TOKENS, min(count for _, count in work.presets.values()) // INDEPENDENT_TEXTS)
    firsts = [first for first, _ in work.presets.values()]
    firsts += [firsts[-1] + number * tokens for number in range(1, INDEPENDENT_TEXTS)]
    return [range(first, first + tokens) for first in firsts]


def _write_table(writer: PackageWriter, name: str, table: Array) -> Rows:
    rows = encode("q4", table)
    writer.matrix(name, rows)
    return rows


def _fit(
    gate: Drawn,
    read: Array,
    normed: Array,
    active: NDArray[np.bool_],
    some: NDArray[np.bool_],
    rank: int,
    quantization: Quantization,
) -> LayerFactors:
    feed_forward = normed[some]
    calibration = Calibration(
        reads=feed_forward if read is normed else read[some],
        feed_forward=feed_forward,
        weights={"gate": decode("q4", gate.rows)},
        values={"gate": gate.values[some]},
        active=active[some],
    )
    return fit_layer(calibration, rank, quantization, PREDICTOR_RECALL)
