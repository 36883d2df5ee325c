"""The first blocks of every feed-forward, computed densely by graphs in steps of few texts: an accelerator's.

Rows are made to signed bytes once, when the process starts, and stay: the same bytes as those of prompts, and the same
graphs, but for one, two or four tokens. What a graph had to clamp is computed again here, in floats from the same
bytes. All products of a layer come to one sum, which stands in the place of the first block's; the other blocks' are
zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
from neuronpipe.native import ffi, lib
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
from neuronpipe.services.worker.participant import TYPES
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


@frozen(kw_only=True)
class _Rows:
    """Of one product, ready for its graph.

    inputs: besides the activations
    scales: [3][neurons], of the rows of each matrix
    most: the greatest product of three scales; the neurons' factors are parts of it. 0: all are nothing
    """

    inputs: dict[str, Any]
    scales: Floats
    most: float


class HeldProducts:
    """The first `blocks` blocks of a model. session: a graph, ready to be computed. lengths: of the graphs, in tokens.
    `load` each layer's weights before the first step. Calling it computes np_wanted_blocks of native/neuronpipe.h,
    whose inputs must be there. A token's sums depend on nothing but the token, where these graphs compute alike."""

    def __init__(
        self, manifest: Manifest, session: Callable[[Graph], Session], *, blocks: int, lengths: tuple[int, ...]
    ) -> None:
        layout = manifest.layout
        self.blocks = blocks
        self._manifest = manifest
        self._stored = offloaded_clusters(layout, blocks) * layout.cluster_neurons
        self._neurons = offloaded_product_blocks(layout, blocks) * layout.block_neurons
        shapes = Shapes.of(manifest, self._neurons)
        self._shape: FeedForward = shapes.feed_forward
        self._by_token, self._drelu = shapes.by_token, manifest.model.activation == "drelu"
        self._graphs = {tokens: session(feed_forward_graph(tokens, self._shape)) for tokens in lengths}
        self._lengths = lengths
        self._layers: list[list[list[_Rows]]] = []  # [layers][experts], in the order of products
        self.clear_counters()

    def load(self, weights: NDArray[np.uint8]) -> None:
        """The next layer's clusters, [experts * held clusters][bytes of both slots]. They are not kept."""
        experts = self._manifest.model.experts
        self._layers.append([self._rows_of(own) for own in weights.reshape(experts, -1, weights.shape[1])])

    def __call__(self, wanted: Any) -> Floats:
        """One layer's sums, by pair and node of the tree: all in the first node's place."""
        if wanted.blocks != self.blocks:
            raise ValueError(f"{wanted.blocks} blocks are wanted, and {self.blocks} are held")
        width, tokens, pairs = self._manifest.model.width, wanted.tokens, wanted.pairs
        x = np.frombuffer(ffi.buffer(wanted.inputs, 4 * tokens * width), np.float32).reshape(tokens, width)
        token = np.frombuffer(ffi.buffer(wanted.pair_token, 4 * pairs), np.uint32)
        weight = np.frombuffer(ffi.buffer(wanted.pair_weight, 4 * pairs), np.float32)
        experts, sums = self._layers[wanted.layer], np.zeros((pairs, self.blocks.bit_count(), width), np.float32)
        for number in range(wanted.groups):
            group = wanted.group[number]
            for first in range(group.first, group.first + group.count, self._lengths[-1]):
                some = slice(first, min(first + self._lengths[-1], group.first + group.count))
                sums[some, 0] = self._sums(experts[group.expert], x[token[some]]) * weight[some, None]
        return sums

    def counters(self) -> dict[str, float]:
        """Since they were cleared: rows that graphs computed, of tokens each by itself; products of a token that were
        computed again; how long graphs took."""
        return {
            "held_rows": self._held_rows,
            "recomputed_tokens": self._recomputed_tokens,
            "graphs_ms": self._graphs_ms,
        }

    def clear_counters(self) -> None:
        """From now on they are of what follows."""
        self._held_rows = self._recomputed_tokens = 0
        self._graphs_ms = 0.0

    # ---- sums ------------------------------------------------------------------------------------------------
    def _sums(self, products: list[_Rows], x: Floats) -> Floats:
        """What an expert's held neurons add for these tokens: the products' sums, one after the other."""
        tokens, width = x.shape
        integers, lengths, is_sound = as_integers(x, self._shape.inputs, by_token=self._by_token)
        padded = np.full((min(n for n in self._lengths if n >= tokens), width), MIDDLE, np.uint16)
        padded[:tokens] = integers
        sums = np.zeros((tokens, width), np.float32)
        for rows in products:
            added, clamped = self._product(rows, padded, lengths, ~is_sound)
            for t in np.flatnonzero(clamped):
                added[t] = self._in_floats(rows, x[t])
                self._recomputed_tokens += 1
            sums += added
        self._held_rows += tokens * len(MATRICES) * self._stored
        return sums

    def _product(self, rows: _Rows, padded: NDArray[np.uint16], lengths: Floats, wrong: Bools) -> tuple[Floats, Bools]:
        """Of one product, and which tokens it is wrong for. wrong: those known before."""
        tokens = len(lengths)
        if rows.most == 0 or not np.isfinite(rows.most):
            return np.zeros((tokens, padded.shape[1]), np.float32), wrong | (rows.most != 0)
        before = perf_counter()
        found = self._graphs[len(padded)].run({"x": padded, **rows.inputs})
        self._graphs_ms += (perf_counter() - before) * 1e3
        outputs = {name: value[:tokens] for name, value in found.items()}
        factors = np.square(lengths.astype(np.float64)) * rows.most
        added = (decode(outputs["y"], self._shape.outputs) * factors[:, None]).astype(np.float32)
        return added, wrong | is_clamped(self._shape, outputs)

    def _in_floats(self, rows: _Rows, x: Floats) -> Floats:
        """The same of one token, [width], without a graph: in one fixed order of sums, by one thread."""
        gate, up = (
            np.einsum("nw,w->n", rows.inputs[name].astype(np.float32), x) * scales
            for name, scales in zip(MATRICES[:2], rows.scales[:2], strict=True)
        )
        values = np.maximum(gate, 0) * (np.maximum(up, 0) if self._drelu else up) * rows.scales[2]
        added: Floats = np.einsum("nw,n->w", rows.inputs["down"].astype(np.float32), values)
        return added

    # ---- rows ------------------------------------------------------------------------------------------------
    def _rows_of(self, clusters: NDArray[np.uint8]) -> list[_Rows]:
        """One expert's held neurons, by products."""
        places = {place.name: place for place in self._manifest.layout.matrices}
        made = [self._as_bytes(clusters, places[name]) for name in MATRICES]
        return [
            self._product_rows(
                [
                    (bytes_[first : first + self._neurons], scales[first : first + self._neurons])
                    for bytes_, scales in made
                ]
            )
            for first in range(0, self._stored, self._neurons)
        ]

    def _as_bytes(self, clusters: NDArray[np.uint8], place: MatrixPlace) -> tuple[NDArray[np.int8], Floats]:
        """All rows of a matrix, [whole products][width], and their scales; padding is zeros."""
        width, neurons = self._manifest.model.width, self._manifest.layout.cluster_neurons
        kind = TYPES[place.quantization or self._manifest.quantization]
        padded = -(-self._stored // self._neurons) * self._neurons
        rows, scales = np.zeros((padded, width), np.int8), np.zeros(padded, np.float32)
        quants_at, scales_at = (
            self._addresses(clusters, part, offset, row_bytes, neurons)
            for part, offset, row_bytes in (
                (place.part, place.quants, lib.np_quant_bytes(kind, width)),
                (place.scales_part, place.scales, lib.np_scale_bytes(kind, width)),
            )
        )
        done = lib.np_rows_to_s8(
            kind,
            ffi.cast("void **", ffi.from_buffer(quants_at)),
            ffi.cast("void **", ffi.from_buffer(scales_at)),
            self._stored,
            width,
            ffi.from_buffer("int8_t[]", rows, require_writable=True),
            width,
            ffi.from_buffer("float[]", scales, require_writable=True),
        )
        if done < 0:
            raise ValueError(f"rows of {width} of type {kind} cannot be made to bytes")
        return rows, scales

    def _addresses(
        self, clusters: NDArray[np.uint8], part: str, offset: int, row_bytes: int, neurons: int
    ) -> NDArray[np.uintp]:
        """Where the rows of all neurons lie: `offset` into a part of each cluster."""
        start = offset + (0 if part == "trigger" else self._manifest.trigger_slot_bytes)
        assert start + neurons * row_bytes <= clusters.shape[1]
        first = clusters.ctypes.data + start + clusters.shape[1] * np.arange(len(clusters), dtype=np.uintp)
        rows: NDArray[np.uintp] = (first[:, None] + row_bytes * np.arange(neurons, dtype=np.uintp)).reshape(-1)
        return rows

    def _product_rows(self, matrices: list[tuple[NDArray[np.int8], Floats]]) -> _Rows:
        scales = np.stack([scales for _, scales in matrices])
        factors = scales.astype(np.float64).prod(axis=0, keepdims=True)
        most = float(factors.max())
        is_sound = most != 0 and np.isfinite(most)
        inputs: dict[str, Any] = {name: bytes_ for name, (bytes_, _) in zip(MATRICES, matrices, strict=True)}
        inputs["factor"] = encode(
            factors / most if is_sound else np.zeros_like(factors), Scale.within(1.0, signed=False)
        )
        return _Rows(inputs=inputs, scales=scales, most=most)
