"""The offloaded blocks of decode steps, which are the first blocks of every feed-forward, computed densely by graphs.

Rows are converted to signed bytes once, when the process starts, and stay in memory. They are the same bytes as those
of prompts, and the graphs are the same but for their lengths: one, two or four tokens. Values that a graph had to clamp
are computed again here, in floats from the same bytes. All products of a layer are added to one sum, which is returned
as that of the first node of the tree of blocks; the sums of the other nodes are zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
from neuronpipe.native import ROW_TYPES, ffi, lib
from neuronpipe.plans.package.layout import MatrixPlace
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.offloaded_blocks import offloaded_clusters
from neuronpipe.plans.plan.segment_sizes import offloaded_product_blocks
from neuronpipe.protocol.frozen import frozen
from neuronpipe.services.offload.npu.graphs import (
    MIDDLE,
    FeedForward,
    Graph,
    Scale,
    Shapes,
    as_integers,
    encode,
    feed_forward_graph,
)
from neuronpipe.services.offload.npu.layer_products import decode, is_clamped
from neuronpipe.services.offload.npu.sessions import Session
from neuronpipe.services.offload.npu.weight_rows import MATRICES
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


@frozen(kw_only=True)
class _PreparedRows:
    """The rows of one product, ready for its graph.

    inputs: the inputs of the graph, except the activations
    scales: scales of the rows of each matrix, [3][neurons]
    max_scale: the greatest product of a neuron's three scales, to which the factors are relative; if it is 0, all
        neurons are zero
    """

    inputs: dict[str, Any]
    scales: Floats
    max_scale: float


class OffloadedProducts:
    """Computes the first `blocks` blocks of a model; implements ComputeBlocks of services/worker/external_products.py.

    session: opens a session for a graph
    lengths: the lengths of the graphs in tokens, ascending

    `load` must be called with the weights of each layer before the first step. The sums of a token depend only on the
    token, provided that the graphs of all lengths compute the same bits.
    """

    def __init__(
        self, manifest: Manifest, session: Callable[[Graph], Session], *, blocks: int, lengths: tuple[int, ...]
    ) -> None:
        layout = manifest.layout
        self.blocks = blocks
        self._manifest = manifest
        self._stored_neurons = offloaded_clusters(layout, blocks) * layout.cluster_neurons
        self._neurons = offloaded_product_blocks(layout, blocks) * layout.block_neurons
        shapes = Shapes.of(manifest, self._neurons)
        self._shape: FeedForward = shapes.feed_forward
        self._by_token, self._drelu = shapes.by_token, manifest.model.activation == "drelu"
        self._graphs = {tokens: session(feed_forward_graph(tokens, self._shape)) for tokens in lengths}
        self._lengths = lengths
        self._layers: list[list[list[_PreparedRows]]] = []  # [layers][experts][products]
        self.clear_counters()

    def load(self, weights: NDArray[np.uint8]) -> None:
        """Convert the next layer's offloaded clusters, [experts * clusters][bytes of both slots]. The array is not
        referenced afterwards."""
        experts = self._manifest.model.expert_counts[len(self._layers)]
        self._layers.append(
            [self._prepare_expert(clusters) for clusters in weights.reshape(experts, -1, weights.shape[1])]
        )

    def __call__(self, request: Any) -> Floats:
        """Return one layer's sums, [pairs][nodes][width]. Only those of the first node are not zero."""
        if request.blocks != self.blocks:
            raise ValueError(f"{request.blocks} blocks are requested, and {self.blocks} are offloaded")
        width, tokens, pairs = self._manifest.model.width, request.tokens, request.pairs
        x = np.frombuffer(ffi.buffer(request.inputs, 4 * tokens * width), np.float32).reshape(tokens, width)
        token = np.frombuffer(ffi.buffer(request.pair_token, 4 * pairs), np.uint32)
        weight = np.frombuffer(ffi.buffer(request.pair_weight, 4 * pairs), np.float32)
        experts, sums = self._layers[request.layer], np.zeros((pairs, self.blocks.bit_count(), width), np.float32)
        for number in range(request.groups):
            group = request.group[number]
            for first in range(group.first, group.first + group.count, self._lengths[-1]):
                part = slice(first, min(first + self._lengths[-1], group.first + group.count))
                sums[part, 0] = self._sums(experts[group.expert], x[token[part]]) * weight[part, None]
        return sums

    def counters(self) -> dict[str, float]:
        """Return the counters since they were cleared.

        held_rows: the rows that graphs computed, counted for each token
        recomputed_tokens: the tokens that were computed again, counted for each product
        graphs_ms: how long graphs were computed
        """
        return {
            "held_rows": self._computed_rows,
            "recomputed_tokens": self._recomputed_tokens,
            "graphs_ms": self._graphs_ms,
        }

    def clear_counters(self) -> None:
        self._computed_rows = self._recomputed_tokens = 0
        self._graphs_ms = 0.0

    # ---- sums ------------------------------------------------------------------------------------------------
    def _sums(self, products: list[_PreparedRows], x: Floats) -> Floats:
        """Return the sum over an expert's offloaded neurons for these tokens, adding the products in order."""
        tokens, width = x.shape
        integers, divisors, is_sound = as_integers(x, self._shape.inputs, by_token=self._by_token)
        padded = np.full((min(n for n in self._lengths if n >= tokens), width), MIDDLE, np.uint16)
        padded[:tokens] = integers
        sums = np.zeros((tokens, width), np.float32)
        for rows in products:
            product, clamped = self._product(rows, padded, divisors, ~is_sound)
            for t in np.flatnonzero(clamped):
                product[t] = self._in_floats(rows, x[t])
                self._recomputed_tokens += 1
            sums += product
        self._computed_rows += tokens * len(MATRICES) * self._stored_neurons
        return sums

    def _product(
        self, rows: _PreparedRows, padded: NDArray[np.uint16], divisors: Floats, unsound: Bools
    ) -> tuple[Floats, Bools]:
        """Return one product, and the tokens for which it must be computed again: the unsound and the clamped ones."""
        tokens = len(divisors)
        if rows.max_scale == 0 or not np.isfinite(rows.max_scale):
            return np.zeros((tokens, padded.shape[1]), np.float32), unsound | (rows.max_scale != 0)
        before = perf_counter()
        padded_outputs = self._graphs[len(padded)].run({"x": padded, **rows.inputs})
        self._graphs_ms += (perf_counter() - before) * 1e3
        outputs = {name: value[:tokens] for name, value in padded_outputs.items()}
        factors = np.square(divisors.astype(np.float64)) * rows.max_scale
        product = (decode(outputs["y"], self._shape.outputs) * factors[:, None]).astype(np.float32)
        return product, unsound | is_clamped(self._shape, outputs)

    def _in_floats(self, rows: _PreparedRows, x: Floats) -> Floats:
        """Compute the product of one token, [width], without a graph. The order of the sums is fixed."""
        gate, up = (
            np.einsum("nw,w->n", rows.inputs[name].astype(np.float32), x) * scales
            for name, scales in zip(MATRICES[:2], rows.scales[:2], strict=True)
        )
        values = np.maximum(gate, 0) * (np.maximum(up, 0) if self._drelu else up) * rows.scales[2]
        product: Floats = np.einsum("nw,n->w", rows.inputs["down"].astype(np.float32), values)
        return product

    # ---- rows ------------------------------------------------------------------------------------------------
    def _prepare_expert(self, clusters: NDArray[np.uint8]) -> list[_PreparedRows]:
        places = {place.name: place for place in self._manifest.layout.matrices}
        matrices = [self._as_bytes(clusters, places[name]) for name in MATRICES]
        return [
            self._prepare_product(
                [
                    (bytes_[first : first + self._neurons], scales[first : first + self._neurons])
                    for bytes_, scales in matrices
                ]
            )
            for first in range(0, self._stored_neurons, self._neurons)
        ]

    def _as_bytes(self, clusters: NDArray[np.uint8], place: MatrixPlace) -> tuple[NDArray[np.int8], Floats]:
        """Return the rows of a matrix, [neurons of whole products][width], and their scales. Padding is zeros."""
        width, neurons = self._manifest.model.width, self._manifest.layout.cluster_neurons
        kind = ROW_TYPES[place.quantization or self._manifest.quantization]
        padded = -(-self._stored_neurons // self._neurons) * self._neurons
        rows, scales = np.zeros((padded, width), np.int8), np.zeros(padded, np.float32)
        quants_at, scales_at = (
            self._addresses(clusters, part, offset, row_bytes, neurons)
            for part, offset, row_bytes in (
                (place.part, place.quants, lib.np_quant_bytes(kind, width)),
                (place.scales_part, place.scales, lib.np_scale_bytes(kind, width)),
            )
        )
        status = lib.np_rows_to_s8(
            kind,
            ffi.cast("void **", ffi.from_buffer(quants_at)),
            ffi.cast("void **", ffi.from_buffer(scales_at)),
            self._stored_neurons,
            width,
            ffi.from_buffer("int8_t[]", rows, require_writable=True),
            width,
            ffi.from_buffer("float[]", scales, require_writable=True),
        )
        if status < 0:
            raise ValueError(f"rows of {width} of type {kind} cannot be converted to bytes")
        return rows, scales

    def _addresses(
        self, clusters: NDArray[np.uint8], part: str, offset: int, row_bytes: int, neurons: int
    ) -> NDArray[np.uintp]:
        """Return the addresses of all neurons' rows, which begin `offset` bytes into a part of each cluster."""
        start = offset + (0 if part == "trigger" else self._manifest.trigger_slot_bytes)
        assert start + neurons * row_bytes <= clusters.shape[1]
        first = clusters.ctypes.data + start + clusters.shape[1] * np.arange(len(clusters), dtype=np.uintp)
        rows: NDArray[np.uintp] = (first[:, None] + row_bytes * np.arange(neurons, dtype=np.uintp)).reshape(-1)
        return rows

    def _prepare_product(self, matrices: list[tuple[NDArray[np.int8], Floats]]) -> _PreparedRows:
        scales = np.stack([scales for _, scales in matrices])
        factors = scales.astype(np.float64).prod(axis=0, keepdims=True)
        max_scale = float(factors.max())
        is_sound = max_scale != 0 and np.isfinite(max_scale)
        inputs: dict[str, Any] = {name: bytes_ for name, (bytes_, _) in zip(MATRICES, matrices, strict=True)}
        inputs["factor"] = encode(
            factors / max_scale if is_sound else np.zeros_like(factors), Scale.within(1.0, signed=False)
        )
        return _PreparedRows(inputs=inputs, scales=scales, max_scale=max_scale)
