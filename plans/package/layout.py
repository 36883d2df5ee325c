"""Where each neuron's bytes lie in bundles.bin: pure arithmetic, shared by the writer, the planner and the services.

A cluster is `cluster_neurons` consecutive neurons of one (layer, expert). It has two parts, each padded to whole pages
so that either is one aligned read: the gate part (gate rows) and the rest part (up and down rows).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

PAGE_BYTES = 4096
SLOT_ALIGNMENT_BYTES = 64  # a cache line
GROUP_WEIGHTS = 32
MOST_CLUSTER_NEURONS = 64
MOST_WASTE = 0.25
LEAST_BLOCK_NEURONS = 64
MOST_BLOCKS = 32
MOST_BLOCK_CLUSTERS = 1 << 16  # a worker keeps a list of one block's clusters

Quantization = Literal["q4", "q8", "f16"]
NeuronOrder = Literal["source", "frequency"]
Part = Literal["gate", "rest"]


def quant_bytes(quantization: Quantization, weights: int) -> int:
    """Bytes of one row's quants (of its values, for f16)."""
    return {"q4": weights // 2, "q8": weights, "f16": 2 * weights}[quantization]


def scale_bytes(quantization: Quantization, weights: int) -> int:
    """Bytes of one row's fp16 scales; 0 for f16."""
    return 0 if quantization == "f16" else 2 * (weights // GROUP_WEIGHTS)


def pages(size_bytes: int) -> int:
    """Whole pages that hold `size_bytes`."""
    return -(-size_bytes // PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of every cluster; `clusters` and `blocks` count per (layer, expert), offsets are within a part."""

    cluster_neurons: int
    clusters: int
    gate_part_bytes: int
    rest_part_bytes: int
    block_neurons: int
    blocks: int
    neuron_order: NeuronOrder
    gate_quants: int
    gate_scales: int
    up_quants: int
    up_scales: int
    down_quants: int
    down_scales: int
    scales_part: Part  # the part that holds the scales of up and down

    @property
    def cluster_stride_bytes(self) -> int:
        """Distance from one cluster to the next in bundles.bin."""
        return self.gate_part_bytes + self.rest_part_bytes

    @property
    def block_clusters(self) -> int:
        """Clusters of one block; the last block of a layer may have fewer."""
        return self.block_neurons // self.cluster_neurons

    def word(self, layer: int, expert: int, experts: int, neuron: int) -> int:
        """Word index of the cluster that holds a neuron: its place in bundles.bin and in the residency words."""
        return (layer * experts + expert) * self.clusters + neuron // self.cluster_neurons

    def offset_bytes(self, word: int, part: Part = "gate") -> int:
        """Where a cluster's part starts in bundles.bin."""
        return word * self.cluster_stride_bytes + (self.gate_part_bytes if part == "rest" else 0)

    def pieces(self, quantization: Quantization, width: int) -> Iterator[tuple[Part, str, int, int]]:
        """(part, what, offset, bytes) of the six pieces of a cluster; scales of f16 have 0 bytes."""
        quants = self.cluster_neurons * quant_bytes(quantization, width)
        scales = self.cluster_neurons * scale_bytes(quantization, width)
        yield "gate", "gate.quants", self.gate_quants, quants
        yield "gate", "gate.scales", self.gate_scales, scales
        yield "rest", "up.quants", self.up_quants, quants
        yield "rest", "down.quants", self.down_quants, quants
        yield self.scales_part, "up.scales", self.up_scales, scales
        yield self.scales_part, "down.scales", self.down_scales, scales

    def slot_bytes(self, part: Part, quantization: Quantization, width: int) -> int:
        """Bytes of a memory slot for this part: up to the end of its last piece, in whole cache lines. Offsets within
        a slot are those within the part; the part's padding is not kept."""
        end = max(offset + size for of, _, offset, size in self.pieces(quantization, width) if of == part)
        return -(-end // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def _place(quantization: Quantization, width: int, count: int) -> tuple[int, int, Part]:
    """(gate pages, rest pages, part of the up and down scales) for clusters of `count` neurons."""
    quants, scales = quant_bytes(quantization, width), scale_bytes(quantization, width)
    with_gate = pages(count * (quants + 3 * scales)), pages(count * 2 * quants)
    with_rest = pages(count * (quants + scales)), pages(count * 2 * (quants + scales))
    if sum(with_gate) < sum(with_rest):
        return *with_gate, "gate"
    return *with_rest, "rest"


def _choose_cluster_neurons(quantization: Quantization, width: int) -> int:
    """The smallest cluster that wastes little, filled up with the neurons that still fit its pages.

    Small clusters serve sparsity, whole pages serve flash. Of the counts up to MOST_CLUSTER_NEURONS the first whose
    padding is at most MOST_WASTE is taken (or the one with the least padding); then as many as need no further page.
    """
    neuron_bytes = 3 * (quant_bytes(quantization, width) + scale_bytes(quantization, width))
    page_counts = {n: sum(_place(quantization, width, n)[:2]) for n in range(1, MOST_CLUSTER_NEURONS + 1)}
    waste = {n: 1 - n * neuron_bytes / (count * PAGE_BYTES) for n, count in page_counts.items()}
    first = next((n for n in waste if waste[n] <= MOST_WASTE), min(waste, key=lambda n: (waste[n], n)))
    return max(n for n in page_counts if n >= first and page_counts[n] == page_counts[first])


def compute_layout(quantization: Quantization, width: int, neurons: int, neuron_order: NeuronOrder) -> Layout:
    """The layout a new package gets. `neurons` are those of one (layer, expert); `width` suits the quantization."""
    count = _choose_cluster_neurons(quantization, width)
    gate_pages, rest_pages, scales_part = _place(quantization, width, count)
    clusters = -(-neurons // count)
    block_neurons = max(LEAST_BLOCK_NEURONS, -(-neurons // MOST_BLOCKS))
    block_neurons = -(-block_neurons // count) * count
    quants, scales = count * quant_bytes(quantization, width), count * scale_bytes(quantization, width)
    scales_start = quants + scales if scales_part == "gate" else 2 * quants
    return Layout(
        cluster_neurons=count,
        clusters=clusters,
        gate_part_bytes=gate_pages * PAGE_BYTES,
        rest_part_bytes=rest_pages * PAGE_BYTES,
        block_neurons=block_neurons,
        blocks=-(-clusters * count // block_neurons),
        neuron_order=neuron_order,
        gate_quants=0,
        gate_scales=quants,
        up_quants=0,
        up_scales=scales_start,
        down_quants=quants,
        down_scales=scales_start + scales,
        scales_part=scales_part,
    )
