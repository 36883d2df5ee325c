"""What prompts on a neural processor lose: measured with the reference engine, whose products of layers the graphs
compute, by ONNX Runtime on the CPU.

One pass over all of the text is exact, and says what ranges its calibration part has. Then the held-out part is
computed twice: with a scale of each token's own, and within these ranges.
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
from neuronpipe.services.offload.npu.layer_products import at_end, decode, is_clamped
from neuronpipe.services.offload.npu.sessions import Session
from neuronpipe.services.offload.npu.weight_rows import MATRICES
from numpy.typing import NDArray

NOTICEABLE = 0.0005
"""By so much has perplexity to be lower within measured ranges, for them to be chosen: they hold for texts like the
calibration's, and scales of the tokens' own for all."""

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
    """scaling: the way to be chosen; None: the one that loses less. text: what the texts are called. Raises
    UserError."""
    package.verify_fixed()
    model, held_out = package.manifest.model, sum(map(len, texts.held_out))
    total = model.layers * (texts.calibration_tokens + 3 * held_out)
    neurons = _neurons(package.manifest)
    recorder = _Recording(package, texts.calibration_tokens, neurons)
    progress(0, total)
    hidden, _ = recorder.hidden([*texts.calibration, *texts.held_out])
    exact = _Scored.of(recorder, hidden[texts.calibration_tokens :], texts.held_out)
    if not math.isfinite(exact.perplexity):
        raise UserError(f"{text}: the perplexity of its held-out part is no finite number: no text for this model")
    ranges, losses = recorder.ranges(), []
    for number, one in enumerate(SCALINGS):
        progress(total - model.layers * (2 - number) * held_out, total)
        shapes = Shapes.scaled(model, neurons, ranges if one == "static" else None)
        engine = _NpuEngine(package, _Products(shapes, open_graph, model.activation))
        hidden, _ = engine.hidden(texts.held_out)
        losses.append(engine.loss(one, _Scored.of(engine, hidden, texts.held_out), exact))
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
    """The package with it, in the place of an older one. Its id changes."""
    with whole_file(package.path / MANIFEST) as place, place.open("wb") as file:
        file.write(dataclasses.replace(package.manifest, npu=profile).sealed().to_bytes())
        file.flush()
        os.fsync(file.fileno())
    return Package.open(package.path)


def _neurons(manifest: Manifest) -> int:
    """Of one product, as runs that have a whole layer at once compute them."""
    return product_blocks(manifest.layout, manifest.layout.blocks) * manifest.layout.block_neurons


@frozen
class _Scored:
    """A text's perplexity, and the likeliest token at each position but each window's last."""

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
        found = np.concatenate(likeliest)
        return cls(float(np.exp(nats / max(1, len(found)))), found)


def _to_bytes(rows: Array) -> tuple[NDArray[np.int8], Array]:
    """Rows as signed bytes, and a scale of each: np_rows_to_s8 of decoded weights."""
    scales = np.abs(rows).max(axis=1) / np.float32(127)
    bytes_: NDArray[np.int8] = np.rint(rows / np.where(scales > 0, scales, np.float32(1))[:, None]).astype(np.int8)
    return bytes_, scales


class _Recording(ReferenceEngine):
    """Exact, and keeps the greatest magnitudes of the first tokens, which are for calibration."""

    def __init__(self, package: Package, calibration_tokens: int, neurons: int) -> None:
        super().__init__(package)
        self._cut, self._neurons, self._model = calibration_tokens, neurons, package.manifest.model
        self._matrices = {size: np.zeros(2) for size in matrix_sizes(self._model)}
        self._most = dict.fromkeys(NeuronRange.__slots__, 0.0)

    def ranges(self) -> Ranges:
        """What there was at most."""
        most, matrices = self._most, self._matrices
        if self._model.parallel:  # one vector for both
            qkv = matrices[self._model.qkv_rows, self._model.width]
            most["inputs"] = qkv[0] = max(most["inputs"], qkv[0])
        tiny = float(np.finfo(np.float32).tiny)  # of what was nothing throughout
        return Ranges(
            tuple(MatrixRange(*size, *(max(tiny, float(one)) for one in found)) for size, found in matrices.items()),
            NeuronRange(**{name: max(tiny, float(value)) for name, value in most.items()}),
        )

    def _product(self, layer: int, name: str, x: Array) -> Array:
        rows = self._weights.matrix(f"layers.{layer}.{name}")
        product: Array = x @ rows.T
        some, scales = product[: self._cut], _to_bytes(rows)[1]
        found = self._matrices[rows.shape[0], rows.shape[1]]
        products = np.abs(some / np.where(scales > 0, scales, np.float32(1))).max()
        found[:] = np.maximum(found, (np.abs(x[: self._cut]).max(), products))
        return product

    def _feed_forward(
        self, layer: int, expert: int, inputs: tuple[Array, Array, Array], tokens: np.ndarray
    ) -> tuple[Array, np.ndarray]:
        some = inputs[-1][tokens < self._cut]
        if len(some):
            gate, up, down = (_to_bytes(rows) for rows in self._weights.neurons(layer, expert))
            self._record(some, gate, up, down)
        return super()._feed_forward(layer, expert, inputs, tokens)

    def _record(self, x: Array, gate: Any, up: Any, down: Any) -> None:
        gates, ups = (np.maximum(x @ rows.astype(np.float32).T, 0) for rows, _ in (gate, up))
        raw = x @ up[0].astype(np.float32).T
        hidden = gates * (ups if self._model.activation == "drelu" else raw)
        self._keep("inputs", np.abs(x).max())
        self._keep("gate", gates.max())
        self._keep("up", ups.max() if self._model.activation == "drelu" else np.abs(raw).max())
        self._keep("hidden", np.abs(hidden).max())
        for first in range(0, len(gate[1]), self._neurons):
            some = slice(first, first + self._neurons)
            factors = gate[1][some].astype(np.float64) * up[1][some] * down[1][some]
            if (most := factors.max()) > 0:
                values = hidden[:, some] * (factors / most).astype(np.float32)
                self._keep("outputs", np.abs(values @ down[0][some].astype(np.float32)).max())

    def _keep(self, name: str, found: float) -> None:
        self._most[name] = max(self._most[name], float(found))


@dataclasses.dataclass
class _Counted:
    """Of one layer: squares of what differs and of what is right; tokens' products, and those computed again."""

    wrong: float = 0.0
    right: float = 0.0
    products: int = 0
    again: int = 0

    def error(self) -> float:
        """The share of what differs."""
        return round(math.sqrt(self.wrong / self.right), 8) if self.right else 0.0


class _Products:
    """Products by graphs of decoded rows, as layer_products.py makes them of stored ones."""

    def __init__(self, shapes: Shapes, open_graph: Open, activation: Any) -> None:
        self._shapes, self._activation = shapes, activation
        self._matrices = {
            (*size, tokens): open_graph(matrix_graph(tokens, shape))
            for size, shape in shapes.matrices.items()
            for tokens in GRAPH_TOKENS
        }
        feed_forward = shapes.feed_forward
        self._feed_forwards = {tokens: open_graph(feed_forward_graph(tokens, feed_forward)) for tokens in GRAPH_TOKENS}

    def matrix(self, x: Array, rows: Array, counted: _Counted) -> Array:
        """x [tokens, columns] times rows."""
        shape = self._shapes.matrices[rows.shape[0], rows.shape[1]]
        weights, scales = _to_bytes(rows)
        integers, lengths, is_sound = as_integers(x, shape.inputs, by_token=self._shapes.by_token)
        sessions = {tokens: self._matrices[shape.rows, shape.columns, tokens] for tokens in GRAPH_TOKENS}
        y = _run(sessions, integers, {"w": weights})["y"]
        found = decode(y, shape.outputs) * lengths[:, None] * scales
        return _counted(found, x @ rows.T, ~is_sound | at_end(y), counted)

    def neurons(self, x: Array, gate: Array, up: Array, down: Array, counted: _Counted) -> Array:
        """What a feed-forward adds, piece after piece."""
        shape, sums = self._shapes.feed_forward, np.zeros_like(x)
        integers, lengths, is_sound = as_integers(x, shape.inputs, by_token=self._shapes.by_token)
        inner = GATED[self._activation](x @ gate.T, x @ up.T)
        for first in range(0, len(gate), shape.neurons):
            some = slice(first, first + shape.neurons)
            made = [_to_bytes(rows[some]) for rows in (gate, up, down)]
            factors = np.zeros((1, shape.neurons))
            factors[0, : len(made[0][1])] = made[0][1].astype(np.float64) * made[1][1] * made[2][1]
            if (most := factors.max()) == 0:
                continue
            rows = [_padded(one[0], shape.neurons) for one in made]
            inputs: dict[str, Any] = dict(zip(MATRICES, rows, strict=True))
            inputs["factor"] = encode(factors / most, Scale.within(1.0, signed=False))
            outputs = _run(self._feed_forwards, integers, inputs)
            found = decode(outputs["y"], shape.outputs) * (np.square(lengths.astype(np.float64)) * most)[:, None]
            clamped = ~is_sound | is_clamped(shape, outputs)
            sums += _counted(found.astype(np.float32), inner[:, some] @ down[some], clamped, counted)
        return sums


def _padded(rows: NDArray[np.int8], neurons: int) -> NDArray[np.int8]:
    return np.concatenate([rows, np.zeros((neurons - len(rows), rows.shape[1]), np.int8)])


def _run(sessions: Mapping[int, Session], x: NDArray[np.uint16], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What a graph gives for all tokens, in the lengths that cost least."""
    first, parts = 0, []
    for tokens in graphs_for(len(x), sorted(sessions)):
        some = x[first : first + tokens]
        first += tokens
        padded = np.full((tokens, x.shape[1]), MIDDLE, np.uint16)
        padded[: len(some)] = some
        found = sessions[tokens].run({"x": padded, **inputs})
        parts.append({name: value[: len(some)] for name, value in found.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _counted(found: Array, exact: Array, clamped: NDArray[np.bool_], counted: _Counted) -> Array:
    """The products, exact ones for tokens that were clamped."""
    result: Array = np.where(clamped[:, None], exact, found)
    counted.wrong += float(np.square(result - exact, dtype=np.float64).sum())
    counted.right += float(np.square(exact, dtype=np.float64).sum())
    counted.products += len(clamped)
    counted.again += int(clamped.sum())
    return result


class _NpuEngine(ReferenceEngine):
    """Products of layers by graphs, all else exact."""

    def __init__(self, package: Package, products: _Products) -> None:
        super().__init__(package)
        self._products, self._counted = products, [_Counted() for _ in range(package.manifest.model.layers)]

    def loss(self, scaling: Scaling, scored: _Scored, exact: _Scored) -> Loss:
        """After the text."""
        products, again = (sum(getattr(one, name) for one in self._counted) for name in ("products", "again"))
        return Loss(
            scaling=scaling,
            perplexity=round(max(1.0, scored.perplexity), 6),
            agreement=round(float(np.mean(scored.likeliest == exact.likeliest)), 6),
            recomputed_share=round(again / max(1, products), 6),
            error_by_layer=tuple(one.error() for one in self._counted),
        )

    def _product(self, layer: int, name: str, x: Array) -> Array:
        return self._products.matrix(x, self._weights.matrix(f"layers.{layer}.{name}"), self._counted[layer])

    def _feed_forward(
        self, layer: int, expert: int, inputs: tuple[Array, Array, Array], tokens: np.ndarray
    ) -> tuple[Array, np.ndarray]:
        gate, up, down = self._weights.neurons(layer, expert)
        change = self._products.neurons(inputs[-1], gate, up, down, self._counted[layer])
        return change, np.zeros(len(gate), np.int64)
