"""Measurement of the accuracy that prompts lose on a neural processor.

A first, exact pass of the reference engine over the whole text measures the ranges of its calibration part. Then the
held-out part is computed twice with the matrix products of layers by graphs (ONNX Runtime on the CPU): with one scale
per token, and with the measured ranges.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from neuronpipe.plans.package.atomic_output import whole_file
from neuronpipe.plans.package.manifest import MANIFEST, Manifest
from neuronpipe.plans.package.npu_section import (
    SCALINGS,
    Loss,
    MatrixRange,
    NeuronRange,
    NpuProfile,
    Ranges,
    Scaling,
    matrix_sizes,
)
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.runtime_memory import GRAPH_TOKENS, graphs_for
from neuronpipe.plans.plan.segment_sizes import product_blocks
from neuronpipe.plans.predictor.calibration_texts import ContextWindow, Texts
from neuronpipe.plans.reference.engine import GATED, ReferenceEngine
from neuronpipe.plans.reference.weights import Array
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from neuronpipe.services.offload.npu.graphs import (
    MIDDLE,
    Graph,
    Scale,
    Shapes,
    as_integers,
    encode,
    feed_forward_graph,
    matrix_graph,
)
from neuronpipe.services.offload.npu.layer_products import decode, is_at_limit, is_clamped
from neuronpipe.services.offload.npu.sessions import Session
from neuronpipe.services.offload.npu.weight_rows import MATRICES
from numpy.typing import NDArray

NOTICEABLE = 0.0005
"""The share by which perplexity must be lower with measured ranges for them to be chosen. Measured ranges fit texts
like the calibration text, whereas scales per token fit every text."""

Progress = Callable[[int, int], None]
Open = Callable[[Graph], Session]


def measure(
    package: Package,
    texts: Texts,
    open_graph: Open,
    *,
    text: str,
    scaling: Scaling | None = None,
    progress: Progress = lambda done, all_: None,
) -> NpuProfile:
    """Measure the losses of both scalings, and choose one.

    text: the name of the texts
    scaling: the scaling to choose; None chooses the one that loses less

    Raises UserError if the perplexity of the held-out texts is not finite.
    """
    package.verify_fixed()
    model, held_out = package.manifest.model, sum(map(len, texts.held_out))
    total = model.layers * (texts.calibration_tokens + 3 * held_out)
    neurons = _product_neurons(package.manifest)
    recorder = _RangeRecorder(package, texts.calibration_tokens, neurons)
    progress(0, total)
    hidden, _ = recorder.hidden([*texts.calibration, *texts.held_out])
    exact = _Scored.of(recorder, hidden[texts.calibration_tokens :], texts.held_out)
    if not math.isfinite(exact.perplexity):
        raise UserError(f"{text}: the perplexity of its held-out part is no finite number: no text for this model")
    ranges, losses = recorder.ranges(), []
    for number, measured_scaling in enumerate(SCALINGS):
        progress(total - model.layers * (2 - number) * held_out, total)
        shapes = Shapes.scaled(model, neurons, ranges if measured_scaling == "static" else None)
        engine = _NpuEngine(package, _Products(shapes, open_graph, model.activation))
        hidden, _ = engine.hidden(texts.held_out)
        losses.append(engine.loss(measured_scaling, _Scored.of(engine, hidden, texts.held_out), exact))
    by_token, static = losses
    better: Scaling = "static" if static.perplexity < by_token.perplexity * (1 - NOTICEABLE) else "token"
    return NpuProfile(
        scaling=better if scaling is None else scaling,
        text=text,
        calibration_tokens=texts.calibration_tokens,
        held_out_tokens=held_out,
        exact_perplexity=round(max(1.0, exact.perplexity), 6),
        losses=tuple(losses),
        ranges=ranges,
    )


def keep(package: Package, profile: NpuProfile) -> Package:
    """Write the profile into the package, replacing an older one. Return the package with its new id."""
    with whole_file(package.path / MANIFEST) as place, place.open("wb") as file:
        file.write(dataclasses.replace(package.manifest, npu=profile).sealed().to_bytes())
        file.flush()
        os.fsync(file.fileno())
    return Package.open(package.path)


def _product_neurons(manifest: Manifest) -> int:
    """Return the neurons of one product in runs that compute a whole layer at once."""
    return product_blocks(manifest.layout, manifest.layout.blocks) * manifest.layout.block_neurons


@frozen
class _Scored:
    """The perplexity of context windows, and the likeliest token at each position but the last of each window."""

    perplexity: float
    likeliest: NDArray[np.intp]

    @classmethod
    def of(cls, engine: ReferenceEngine, hidden: Array, windows: Sequence[ContextWindow]) -> _Scored:
        nats, likeliest, start = 0.0, [], 0
        for window in windows:
            logits = engine.logits(hidden[start : start + len(window) - 1]).astype(np.float64)
            start += len(window)
            top = logits.max(axis=1, keepdims=True)
            spread = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
            nats += float((spread - logits[np.arange(len(logits)), np.asarray(window[1:])]).sum())
            likeliest.append(logits.argmax(axis=1))
        tokens = np.concatenate(likeliest)
        return cls(float(np.exp(nats / max(1, len(tokens)))), tokens)


def _to_bytes(rows: Array) -> tuple[NDArray[np.int8], Array]:
    """Convert rows to signed bytes and a scale per row, as np_rows_to_s8 does with stored weights."""
    scales = np.abs(rows).max(axis=1) / np.float32(127)
    bytes_: NDArray[np.int8] = np.rint(rows / np.where(scales > 0, scales, np.float32(1))[:, None]).astype(np.int8)
    return bytes_, scales


class _RangeRecorder(ReferenceEngine):
    """An exact engine that records the greatest magnitudes of the calibration tokens, which come first."""

    def __init__(self, package: Package, calibration_tokens: int, neurons: int) -> None:
        super().__init__(package)
        self._calibration_tokens, self._neurons = calibration_tokens, neurons
        self._model = package.manifest.model
        self._matrices = {size: np.zeros(2) for size in matrix_sizes(self._model)}
        self._maxima = dict.fromkeys(NeuronRange.__slots__, 0.0)

    def ranges(self) -> Ranges:
        maxima, matrices = self._maxima, self._matrices
        if self._model.parallel:  # qkv and the feed-forward read the same vector
            qkv = matrices[self._model.qkv_rows, self._model.width]
            maxima["inputs"] = qkv[0] = max(maxima["inputs"], qkv[0])
        tiny = float(np.finfo(np.float32).tiny)  # a range must not be empty, even if all values were 0
        return Ranges(
            tuple(
                MatrixRange(*size, *(max(tiny, float(value)) for value in matrix_maxima))
                for size, matrix_maxima in matrices.items()
            ),
            NeuronRange(**{name: max(tiny, float(value)) for name, value in maxima.items()}),
        )

    def _product(self, layer: int, name: str, x: Array) -> Array:
        rows = self._weights.matrix(f"layers.{layer}.{name}")
        product: Array = x @ rows.T
        calibration, scales = product[: self._calibration_tokens], _to_bytes(rows)[1]
        maxima = self._matrices[rows.shape[0], rows.shape[1]]
        max_product = np.abs(calibration / np.where(scales > 0, scales, np.float32(1))).max()
        maxima[:] = np.maximum(maxima, (np.abs(x[: self._calibration_tokens]).max(), max_product))
        return product

    def _feed_forward(
        self, layer: int, expert: int, inputs: tuple[Array, Array, Array], tokens: np.ndarray
    ) -> tuple[Array, np.ndarray]:
        calibration = inputs[-1][tokens < self._calibration_tokens]
        if len(calibration):
            gate, up, down = (_to_bytes(rows) for rows in self._weights.neurons(layer, expert))
            self._record(calibration, gate, up, down)
        return super()._feed_forward(layer, expert, inputs, tokens)

    def _record(self, x: Array, gate: Any, up: Any, down: Any) -> None:
        gates, ups = (np.maximum(x @ rows.astype(np.float32).T, 0) for rows, _ in (gate, up))
        raw = x @ up[0].astype(np.float32).T
        hidden = gates * (ups if self._model.activation == "drelu" else raw)
        self._raise_maximum("inputs", np.abs(x).max())
        self._raise_maximum("gate", gates.max())
        self._raise_maximum("up", ups.max() if self._model.activation == "drelu" else np.abs(raw).max())
        self._raise_maximum("hidden", np.abs(hidden).max())
        for first in range(0, len(gate[1]), self._neurons):
            part = slice(first, first + self._neurons)
            factors = gate[1][part].astype(np.float64) * up[1][part] * down[1][part]
            if (max_scale := factors.max()) > 0:
                values = hidden[:, part] * (factors / max_scale).astype(np.float32)
                self._raise_maximum("outputs", np.abs(values @ down[0][part].astype(np.float32)).max())

    def _raise_maximum(self, name: str, magnitude: float) -> None:
        self._maxima[name] = max(self._maxima[name], float(magnitude))


@dataclasses.dataclass
class _LayerErrors:
    """The errors of one layer.

    squared_error, squared_exact: sums of squares of the differences and of the exact products
    products, recomputed: the number of products, counted for each token, and of those computed again
    """

    squared_error: float = 0.0
    squared_exact: float = 0.0
    products: int = 0
    recomputed: int = 0

    def relative_error(self) -> float:
        return round(math.sqrt(self.squared_error / self.squared_exact), 8) if self.squared_exact else 0.0


class _Products:
    """Products by graphs from decoded rows, with the arithmetic of layer_products.py."""

    def __init__(self, shapes: Shapes, open_graph: Open, activation: Any) -> None:
        self._shapes, self._activation = shapes, activation
        self._matrices = {
            (*size, tokens): open_graph(matrix_graph(tokens, shape))
            for size, shape in shapes.matrices.items()
            for tokens in GRAPH_TOKENS
        }
        feed_forward = shapes.feed_forward
        self._feed_forwards = {tokens: open_graph(feed_forward_graph(tokens, feed_forward)) for tokens in GRAPH_TOKENS}

    def matrix(self, x: Array, rows: Array, errors: _LayerErrors) -> Array:
        """Return x [tokens, columns] times rows [rows, columns]."""
        shape = self._shapes.matrices[rows.shape[0], rows.shape[1]]
        weights, scales = _to_bytes(rows)
        integers, divisors, is_sound = as_integers(x, shape.inputs, by_token=self._shapes.by_token)
        sessions = {tokens: self._matrices[shape.rows, shape.columns, tokens] for tokens in GRAPH_TOKENS}
        y = _run(sessions, integers, {"w": weights})["y"]
        products = decode(y, shape.outputs) * divisors[:, None] * scales
        return _counted(products, x @ rows.T, ~is_sound | is_at_limit(y), errors)

    def neurons(self, x: Array, gate: Array, up: Array, down: Array, errors: _LayerErrors) -> Array:
        """Return the sums of a feed-forward, adding product after product."""
        shape, sums = self._shapes.feed_forward, np.zeros_like(x)
        integers, divisors, is_sound = as_integers(x, shape.inputs, by_token=self._shapes.by_token)
        inner = GATED[self._activation](x @ gate.T, x @ up.T)
        for first in range(0, len(gate), shape.neurons):
            part = slice(first, first + shape.neurons)
            matrices = [_to_bytes(rows[part]) for rows in (gate, up, down)]
            factors = np.zeros((1, shape.neurons))
            factors[0, : len(matrices[0][1])] = matrices[0][1].astype(np.float64) * matrices[1][1] * matrices[2][1]
            if (max_scale := factors.max()) == 0:
                continue
            rows = [_padded(matrix_rows, shape.neurons) for matrix_rows, _ in matrices]
            inputs: dict[str, Any] = dict(zip(MATRICES, rows, strict=True))
            inputs["factor"] = encode(factors / max_scale, Scale.within(1.0, signed=False))
            outputs = _run(self._feed_forwards, integers, inputs)
            factor = (np.square(divisors.astype(np.float64)) * max_scale)[:, None]
            products = decode(outputs["y"], shape.outputs) * factor
            clamped = ~is_sound | is_clamped(shape, outputs)
            sums += _counted(products.astype(np.float32), inner[:, part] @ down[part], clamped, errors)
        return sums


def _padded(rows: NDArray[np.int8], neurons: int) -> NDArray[np.int8]:
    return np.concatenate([rows, np.zeros((neurons - len(rows), rows.shape[1]), np.int8)])


def _run(sessions: Mapping[int, Session], x: NDArray[np.uint16], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the outputs of a graph for all tokens, with the lengths that cost least."""
    first, parts = 0, []
    for tokens in graphs_for(len(x), sorted(sessions)):
        part = x[first : first + tokens]
        first += tokens
        padded = np.full((tokens, x.shape[1]), MIDDLE, np.uint16)
        padded[: len(part)] = part
        outputs = sessions[tokens].run({"x": padded, **inputs})
        parts.append({name: value[: len(part)] for name, value in outputs.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _counted(products: Array, exact: Array, clamped: NDArray[np.bool_], errors: _LayerErrors) -> Array:
    """Return the products with exact ones for clamped tokens, and count their errors."""
    result: Array = np.where(clamped[:, None], exact, products)
    errors.squared_error += float(np.square(result - exact, dtype=np.float64).sum())
    errors.squared_exact += float(np.square(exact, dtype=np.float64).sum())
    errors.products += len(clamped)
    errors.recomputed += int(clamped.sum())
    return result


class _NpuEngine(ReferenceEngine):
    """An engine whose matrix products are computed by graphs, and everything else exactly."""

    def __init__(self, package: Package, products: _Products) -> None:
        super().__init__(package)
        self._products, self._errors = products, [_LayerErrors() for _ in range(package.manifest.model.layers)]

    def loss(self, scaling: Scaling, scored: _Scored, exact: _Scored) -> Loss:
        """Return the loss of a scaling, once all of the text has been computed."""
        products = sum(errors.products for errors in self._errors)
        recomputed = sum(errors.recomputed for errors in self._errors)
        return Loss(
            scaling=scaling,
            perplexity=round(max(1.0, scored.perplexity), 6),
            agreement=round(float(np.mean(scored.likeliest == exact.likeliest)), 6),
            recomputed_share=round(recomputed / max(1, products), 6),
            error_by_layer=tuple(errors.relative_error() for errors in self._errors),
        )

    def _product(self, layer: int, name: str, x: Array) -> Array:
        return self._products.matrix(x, self._weights.matrix(f"layers.{layer}.{name}"), self._errors[layer])

    def _feed_forward(
        self, layer: int, expert: int, inputs: tuple[Array, Array, Array], tokens: np.ndarray
    ) -> tuple[Array, np.ndarray]:
        gate, up, down = self._weights.neurons(layer, expert)
        change = self._products.neurons(inputs[-1], gate, up, down, self._errors[layer])
        return change, np.zeros(len(gate), np.int64)
