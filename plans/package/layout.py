"""Positions of each neuron's bytes in bundles.bin: pure arithmetic, shared by the writer, the planner and the services.

A cluster is `cluster_neurons` consecutive neurons of one (layer, expert). It has two parts, each padded to whole pages
so that either is one aligned read: the trigger part (the rows that decide whether a neuron fires: Gate, or Up in a
feed-forward without Gate) and the value part (the other rows).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

from neuronpipe.protocol.frozen import frozen

PAGE_BYTES = 4096
SLOT_ALIGNMENT_BYTES = 64  # a cache line
GROUP_WEIGHTS = 32
BLOCK_WEIGHTS, BLOCK_SCALE_BYTES, BLOCK_HALVES_BYTES = 256, 16, 32  # with a minimum: a block's scales and minima
MAX_CLUSTER_NEURONS = 64
MAX_WASTE = 0.25
MAX_WHOLE_WASTE = 0.03  # for clusters that are nearly always needed, with all their neighbours
MIN_BLOCK_NEURONS = 64
MAX_BLOCKS = 32
MAX_BLOCK_CLUSTERS = 1 << 16  # a worker keeps a list of one block's clusters

Quantization = Literal["q3", "q4", "iq4", "mxfp4", "q4k", "q5k", "q6k", "q4h", "q5h", "q8", "f16"]  # q3: for gates only
NeuronOrder = Literal["source", "frequency"]
Part = Literal["trigger", "value"]


BITS: Mapping[Quantization, int] = {
    "q3": 3,
    "q4": 4,
    "iq4": 4,
    "mxfp4": 4,
    "q4k": 4,
    "q5k": 5,
    "q6k": 6,
    "q4h": 4,
    "q5h": 5,
    "q8": 8,
    "f16": 16,
}
BLOCK_QUANTIZATIONS: tuple[Quantization, ...] = ("q4k", "q5k", "q6k")  # scales and minima of six bits
HALF_QUANTIZATIONS: tuple[Quantization, ...] = ("q4h", "q5h")  # scales and minima of fp16
MINIMUM_QUANTIZATIONS = (*BLOCK_QUANTIZATIONS, *HALF_QUANTIZATIONS)  # with a minimum for each group
CODEBOOK_QUANTIZATIONS: tuple[Quantization, ...] = ("iq4", "mxfp4")  # as q4, with values from a table
_SAME_INPUTS: tuple[frozenset[Quantization], ...] = (
    frozenset(("q3", "q4", *CODEBOOK_QUANTIZATIONS)),
    frozenset(MINIMUM_QUANTIZATIONS),
)


def quant_bytes(quantization: Quantization, weights: int) -> int:
    """Return the bytes of one row's quants (of its values, for f16)."""
    return weights // 8 * BITS[quantization] if quantization != "f16" else 2 * weights


def scale_bytes(quantization: Quantization, weights: int) -> int:
    """Return the bytes of one row's scales, with the minima if the encoding has them; 0 for f16."""
    if quantization == "f16":
        return 0
    if quantization in MINIMUM_QUANTIZATIONS:
        block_bytes = BLOCK_HALVES_BYTES if quantization in HALF_QUANTIZATIONS else BLOCK_SCALE_BYTES
        return -(-weights // BLOCK_WEIGHTS) * block_bytes
    return 2 * (weights // GROUP_WEIGHTS)


def row_bytes(quantization: Quantization, weights: int) -> int:
    """Return the bytes of one row: its quants and its scales."""
    return quant_bytes(quantization, weights) + scale_bytes(quantization, weights)


def reads_inputs_of(quantization: Quantization, other: Quantization) -> bool:
    """Return True if rows of one quantization read vectors that are prepared for the other, so that they may stand
    beside each other in a layer: np_reads_inputs_of of the native library."""
    return quantization == other or any({quantization, other} <= same for same in _SAME_INPUTS)


def is_quantized_with(quantization: Quantization, other: Quantization) -> bool:
    """Return True if both are quantized with full rows of their own inputs, or both are f16: embedding, output and down
    may then differ from the package's quantization."""
    return (quantization == "f16") == (other == "f16") and quantization != "q3"


def pages(size_bytes: int) -> int:
    """Return the number of pages that `size_bytes` need."""
    return -(-size_bytes // PAGE_BYTES)


@frozen(slots=True)
class MatrixPlace:
    """Positions of a matrix's rows in a cluster: the part of its quants and of its scales, and the offsets within them.

    quantization: encoding of its rows, if it is not the package's
    """

    name: str
    part: Part
    quants: int
    scales_part: Part
    scales: int
    quantization: Quantization | None = None


@frozen(slots=True)
class SlotPlaces:
    """Positions of a cluster's bytes in its two memory slots: offsets of `matrices` are within a slot.

    moved_from, moved_bytes: the range of the trigger part in bundles.bin that lies at the end of the value slot: the
        co-located scales of the value part's matrices. With 0 bytes each slot has the first bytes of its part, and
        nothing else.
    """

    trigger_bytes: int
    value_bytes: int
    matrices: tuple[MatrixPlace, ...]
    moved_from: int = 0
    moved_bytes: int = 0

    @property
    def both_bytes(self) -> int:
        """Memory of a resident cluster, in both slots."""
        return self.trigger_bytes + self.value_bytes


@frozen(slots=True)
class Layout:
    """The layout of every cluster. `clusters` and `blocks` count per (layer, expert), offsets are within a part.

    matrices: matrices of the feed-forward, the trigger first: gate, up, down, or up, down.
    """

    cluster_neurons: int
    clusters: int
    trigger_part_bytes: int
    value_part_bytes: int
    block_neurons: int
    blocks: int
    neuron_order: NeuronOrder
    matrices: tuple[MatrixPlace, ...]

    @property
    def cluster_stride_bytes(self) -> int:
        """Distance from one cluster to the next in bundles.bin."""
        return self.trigger_part_bytes + self.value_part_bytes

    @property
    def block_clusters(self) -> int:
        """Clusters of one block; the last block of a layer may have fewer."""
        return self.block_neurons // self.cluster_neurons

    def cluster_index(self, layer: int, expert: int, experts: int, neuron: int) -> int:
        """Return the index of a neuron's cluster, in bundles.bin and among the residency entries."""
        return (layer * experts + expert) * self.clusters + neuron // self.cluster_neurons

    def offset_bytes(self, cluster: int, part: Part = "trigger") -> int:
        """Return the position of a cluster's part in bundles.bin."""
        return cluster * self.cluster_stride_bytes + self.part_offset(part)

    def part_offset(self, part: Part) -> int:
        """Return the position of a part within its cluster."""
        return self.trigger_part_bytes if part == "value" else 0

    def value_read_bytes(self, *, moved: bool) -> int:
        """Return the bytes of a read of a value part.

        moved: with the trigger part, which has the co-located scales
        """
        return self.cluster_stride_bytes if moved else self.value_part_bytes

    def pieces(self, quantization: Quantization, width: int) -> Iterator[tuple[Part, str, int, int]]:
        """Yield (part, name, offset, bytes) of the pieces of a cluster; scales of f16 have 0 bytes.

        quantization: the package's
        """
        count = self.cluster_neurons
        for matrix in self.matrices:
            of_matrix = matrix.quantization or quantization
            yield matrix.part, f"{matrix.name}.quants", matrix.quants, count * quant_bytes(of_matrix, width)
            yield matrix.scales_part, f"{matrix.name}.scales", matrix.scales, count * scale_bytes(of_matrix, width)

    def slot_bytes(self, part: Part, quantization: Quantization, width: int) -> int:
        """Return the size of a memory slot for this part: up to the end of its last piece, in whole cache lines.
        Offsets within a slot are those within the part; the part's padding is not in memory."""
        return _in_lines(max(offset + size for of, _, offset, size in self.pieces(quantization, width) if of == part))

    def slots(self, quantization: Quantization, width: int, *, moved: bool = False) -> SlotPlaces:
        """Return the slots of this layout.

        moved: put the scales of the value rows into the value slot (co-located scales), although bundles.bin has them
            in the trigger part; a resident trigger then takes only its own rows. Ignored if that saves nothing
        """
        trigger, value = self.slot_bytes("trigger", quantization, width), self.slot_bytes("value", quantization, width)
        trigger_end, start, end = self._trigger_part(quantization, width)
        size = _in_lines(end - start)
        lies_behind = trigger_end <= start and start + size <= self.trigger_part_bytes
        if not moved or not size or not lies_behind or _in_lines(trigger_end) + size > trigger:
            return SlotPlaces(trigger, value, self.matrices)
        matrices = tuple(
            place
            if place.part == "trigger"
            else replace(place, scales_part="value", scales=value + place.scales - start)
            for place in self.matrices
        )
        return SlotPlaces(_in_lines(trigger_end), value + size, matrices, start, size)

    def _trigger_part(self, quantization: Quantization, width: int) -> tuple[int, int, int]:
        """Return three positions in the trigger part: the end of the trigger's rows, and the begin and end of other
        matrices' scales."""
        trigger_end, scales = 0, []
        for part, what, offset, size in self.pieces(quantization, width):
            if part == "trigger" and what.startswith(f"{self.matrices[0].name}."):
                trigger_end = max(trigger_end, offset + size)
            elif part == "trigger" and size:
                scales.append((offset, offset + size))
        return trigger_end, min((a for a, _ in scales), default=0), max((b for _, b in scales), default=0)


def _in_lines(size_bytes: int) -> int:
    """Round a size up to whole cache lines, in bytes."""
    return -(-size_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


@frozen(slots=True)
class _RowBytes:
    """Bytes of a neuron's rows: quants and scales of its trigger, and of each of its other rows."""

    trigger: int
    trigger_scales: int
    values: tuple[int, ...]
    value_scales: tuple[int, ...]

    @property
    def all(self) -> int:
        return self.trigger + self.trigger_scales + sum(self.values) + sum(self.value_scales)


def _pages(row: _RowBytes, count: int) -> tuple[int, int, Part]:
    """Return (trigger pages, value pages, part with the values' scales) for clusters of `count` neurons."""
    trigger, values, scales = row.trigger + row.trigger_scales, sum(row.values), sum(row.value_scales)
    with_triggers = pages(count * (trigger + scales)), pages(count * values)
    with_values = pages(count * trigger), pages(count * (values + scales))
    if sum(with_triggers) < sum(with_values):
        return *with_triggers, "trigger"
    return *with_values, "value"


def _choose_cluster_neurons(row: _RowBytes, max_waste: float) -> int:
    """Return the smallest cluster that wastes little, filled up with the neurons that still fit its pages.

    Small clusters serve sparsity, whole pages serve flash. The first count up to MAX_CLUSTER_NEURONS whose padding is
    at most max_waste is chosen (or the one with the least padding); then as many neurons as need no further page.
    """
    page_counts = {n: sum(_pages(row, n)[:2]) for n in range(1, MAX_CLUSTER_NEURONS + 1)}
    waste = {n: 1 - n * row.all / (count * PAGE_BYTES) for n, count in page_counts.items()}
    first = next((n for n in waste if waste[n] <= max_waste), min(waste, key=lambda n: (waste[n], n)))
    return max(n for n in page_counts if n >= first and page_counts[n] == page_counts[first])


def compute_layout(
    quantization: Quantization,
    width: int,
    neurons: int,
    matrices: tuple[str, ...],
    neuron_order: NeuronOrder,
    *,
    differing: Mapping[str, Quantization | None] | None = None,
    read_whole: bool = False,
) -> Layout:
    """Return the layout of a new package.

    neurons: of one (layer, expert)
    matrices: of the feed-forward, the trigger first; `width` suits the quantization. own: quantizations of matrices
        that differ from the package's, by name.
    read_whole: a token needs nearly all clusters of a feed-forward, so that small clusters save nothing and padding is
        read with them
    """
    max_waste = MAX_WHOLE_WASTE if read_whole else MAX_WASTE
    differing = {name: other for name, other in (differing or {}).items() if other != quantization}
    of_trigger, *of_values = (differing.get(name) or quantization for name in matrices)
    row = _RowBytes(
        trigger=quant_bytes(of_trigger, width),
        trigger_scales=scale_bytes(of_trigger, width),
        values=tuple(quant_bytes(of_value, width) for of_value in of_values),
        value_scales=tuple(scale_bytes(of_value, width) for of_value in of_values),
    )
    count = _choose_cluster_neurons(row, max_waste)
    trigger_pages, value_pages, scales_part = _pages(row, count)
    clusters = -(-neurons // count)
    block_neurons = max(MIN_BLOCK_NEURONS, -(-neurons // MAX_BLOCKS))
    block_neurons = -(-block_neurons // count) * count
    trigger_end = count * (row.trigger + row.trigger_scales)
    scales_start = trigger_end if scales_part == "trigger" else count * sum(row.values)
    trigger = MatrixPlace(matrices[0], "trigger", 0, "trigger", count * row.trigger, differing.get(matrices[0]))
    values = (
        MatrixPlace(
            name,
            "value",
            count * sum(row.values[:n]),
            scales_part,
            scales_start + count * sum(row.value_scales[:n]),
            differing.get(name),
        )
        for n, name in enumerate(matrices[1:])
    )
    return Layout(
        cluster_neurons=count,
        clusters=clusters,
        trigger_part_bytes=trigger_pages * PAGE_BYTES,
        value_part_bytes=value_pages * PAGE_BYTES,
        block_neurons=block_neurons,
        blocks=-(-clusters * count // block_neurons),
        neuron_order=neuron_order,
        matrices=(trigger, *values),
    )
