"""Positions of each neuron's bytes in bundles.bin and in memory slots, for the writer, the planner and the services.

A cluster is `cluster_neurons` consecutive neurons of one (layer, expert). It has two parts, each padded to whole pages
so that it can be read with one aligned read: the trigger part (the rows that decide whether a neuron fires: Gate, or Up
in a feed-forward without Gate) and the value part (the other rows).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

from neuronpipe.protocol.frozen import frozen

PAGE_BYTES = 4096
SLOT_ALIGNMENT_BYTES = 64  # a cache line
GROUP_WEIGHTS = 32
BLOCK_WEIGHTS = 256  # quantizations with minima store scales and minima by blocks of this many weights
BLOCK_SCALE_BYTES, BLOCK_HALVES_BYTES = 16, 32  # a block's scales and minima with six bits each, and in fp16
MAX_CLUSTER_NEURONS = 64
MAX_WASTE = 0.25  # share of a cluster's pages that may be padding
MAX_WHOLE_WASTE = 0.03  # the same if an expert's clusters are read together, because padding is then read, too
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
    """Return the bytes of one row's quants; for f16, of its values."""
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
    return quant_bytes(quantization, weights) + scale_bytes(quantization, weights)


def reads_inputs_of(quantization: Quantization, other: Quantization) -> bool:
    """Return True if rows of one quantization can be multiplied with vectors that were prepared for the other, so that
    a layer may have both. Equals np_reads_inputs_of of the native library."""
    return quantization == other or any({quantization, other} <= same for same in _SAME_INPUTS)


def is_quantized_with(quantization: Quantization, other: Quantization) -> bool:
    """Return True if a matrix whose input vectors are prepared separately may have `quantization` in a package of
    `other`: embedding, output, down and, with silu, those of attention. All go together, except f16 with another one,
    and q3, which is for gates."""
    return (quantization == "f16") == (other == "f16") and quantization != "q3"


def pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES)


@frozen(slots=True)
class MatrixPlace:
    """Position of a matrix's rows in a cluster.

    quants: offset of the quants within `part`, in bytes
    scales: offset of the scales within `scales_part`, in bytes
    quantization: encoding of the rows; None: the package's
    """

    name: str
    part: Part
    quants: int
    scales_part: Part
    scales: int
    quantization: Quantization | None = None


@frozen(slots=True)
class SlotPlaces:
    """Positions of a cluster's bytes in its two memory slots.

    trigger_bytes, value_bytes: sizes of the slots
    matrices: offsets are within a slot
    moved_from, moved_bytes: start and size of the range of the trigger part in bundles.bin that is copied to the end of
        the value slot: the co-located scales of the value part's matrices. 0 bytes: each slot has only the first bytes
        of its own part.
    """

    trigger_bytes: int
    value_bytes: int
    matrices: tuple[MatrixPlace, ...]
    moved_from: int = 0
    moved_bytes: int = 0

    @property
    def both_bytes(self) -> int:
        """Memory of a cluster of which both parts are resident."""
        return self.trigger_bytes + self.value_bytes


@frozen(slots=True)
class Layout:
    """The layout of clusters, the same for all of a package.

    trigger_part_bytes, value_part_bytes: if experts are read in place, the most that pages around a part's rows take
    clusters, blocks: numbers per (layer, expert)
    matrices: matrices of the feed-forward, the trigger first: gate, up, down, or up, down; offsets are within a part,
        or within a slot if experts are read in place
    down_by_output: Down has a row for each output, as in checkpoints, with the weights of a cluster's neurons. A
        mixture's expert is one cluster, and the feed-forward of a dense model is several, its slices.
    """

    cluster_neurons: int
    clusters: int
    trigger_part_bytes: int
    value_part_bytes: int
    block_neurons: int
    blocks: int
    neuron_order: NeuronOrder
    matrices: tuple[MatrixPlace, ...]
    down_by_output: bool = False

    @property
    def cluster_stride_bytes(self) -> int:
        """Distance from one cluster to the next in bundles.bin."""
        return self.trigger_part_bytes + self.value_part_bytes

    @property
    def slices(self) -> int:
        """Number of parts of a feed-forward that each have rows of Down of their own: 1 unless `down_by_output`."""
        return self.clusters if self.down_by_output else 1

    @property
    def summed_blocks(self) -> int:
        """Number of blocks whose sums are added at once: those of an expert, or of a slice, its only one."""
        return self.blocks // self.slices

    @property
    def block_clusters(self) -> int:
        """Number of clusters of a block; the last block of an expert may have fewer."""
        return self.block_neurons // self.cluster_neurons

    def cluster_index(self, ffn: int, neuron: int) -> int:
        """Return the index of a neuron's cluster, in bundles.bin and among the residency entries.

        ffn: number of the feed-forward, counted through all layers (`ModelSpec.first_ffns`)
        """
        return ffn * self.clusters + neuron // self.cluster_neurons

    def offset_bytes(self, cluster: int, part: Part = "trigger") -> int:
        return cluster * self.cluster_stride_bytes + self.part_offset(part)

    def part_offset(self, part: Part) -> int:
        return self.trigger_part_bytes if part == "value" else 0

    def value_read_bytes(self, *, moved: bool) -> int:
        """Return the bytes to read from bundles.bin for a value slot.

        moved: scales are co-located; the read includes the trigger part, which has them
        """
        return self.cluster_stride_bytes if moved else self.value_part_bytes

    def pieces(self, quantization: Quantization, width: int) -> Iterator[tuple[Part, str, int, int]]:
        """Yield (part, name, offset, bytes) of the pieces of a cluster: each matrix's quants and scales. Scales of f16
        have 0 bytes.

        quantization: the package's
        """
        for matrix in self.matrices:
            of_matrix, (rows, columns) = matrix.quantization or quantization, self.rows_and_columns(matrix.name, width)
            yield matrix.part, f"{matrix.name}.quants", matrix.quants, rows * quant_bytes(of_matrix, columns)
            yield matrix.scales_part, f"{matrix.name}.scales", matrix.scales, rows * scale_bytes(of_matrix, columns)

    def rows_and_columns(self, matrix: str, width: int) -> tuple[int, int]:
        """Return the number of a matrix's rows in a cluster, and of the weights in each."""
        if self.down_by_output and matrix == "down":
            return width, self.cluster_neurons
        return self.cluster_neurons, width

    def slot_bytes(self, part: Part, quantization: Quantization, width: int) -> int:
        """Return the bytes of a memory slot for a part: up to the end of its last piece, in whole cache lines. Offsets
        within the slot equal those within the part."""
        return _in_lines(max(offset + size for of, _, offset, size in self.pieces(quantization, width) if of == part))

    def slots(self, quantization: Quantization, width: int, *, moved: bool = False) -> SlotPlaces:
        """Return the memory slots of a cluster.

        moved: put the scales of the value rows into the value slot (co-located scales), although bundles.bin has them
            in the trigger part; the trigger slot then has only the trigger rows. Ignored if that saves no memory.
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
        """Return three offsets in the trigger part: the end of the trigger's rows, and start and end of the scales of
        other matrices (0, 0 if there are none)."""
        trigger_end, scales = 0, []
        for part, what, offset, size in self.pieces(quantization, width):
            if part == "trigger" and what.startswith(f"{self.matrices[0].name}."):
                trigger_end = max(trigger_end, offset + size)
            elif part == "trigger" and size:
                scales.append((offset, offset + size))
        return trigger_end, min((a for a, _ in scales), default=0), max((b for _, b in scales), default=0)


def _in_lines(size_bytes: int) -> int:
    return -(-size_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


@frozen(slots=True)
class _RowBytes:
    """Bytes of a neuron's rows, quants and scales separately; values: one number for each row of the value part."""

    trigger: int
    trigger_scales: int
    values: tuple[int, ...]
    value_scales: tuple[int, ...]

    @property
    def all(self) -> int:
        return self.trigger + self.trigger_scales + sum(self.values) + sum(self.value_scales)


def _pages(row: _RowBytes, count: int) -> tuple[int, int, Part]:
    """Return (trigger pages, value pages, part with the values' scales) for clusters of `count` neurons. The scales
    lie in the part where fewer pages are needed."""
    trigger, values, scales = row.trigger + row.trigger_scales, sum(row.values), sum(row.value_scales)
    with_triggers = pages(count * (trigger + scales)), pages(count * values)
    with_values = pages(count * trigger), pages(count * (values + scales))
    if sum(with_triggers) < sum(with_values):
        return *with_triggers, "trigger"
    return *with_values, "value"


def _choose_cluster_neurons(row: _RowBytes, max_waste: float) -> int:
    """Return the number of neurons of a cluster.

    Small clusters make use of sparsity, but padding wastes reads. Chosen is the smallest number up to
    MAX_CLUSTER_NEURONS whose padding is at most the share `max_waste` of its pages, or else the number with the least
    padding; then it is raised while no further page is needed.
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

    width: weights of a row; a multiple of 32 unless the quantization is f16
    neurons: number of neurons of one (layer, expert)
    matrices: names of the feed-forward's matrices, the trigger first
    differing: quantizations by matrix, where they differ from `quantization`
    read_whole: a token needs nearly all clusters of an expert, so that small clusters save nothing
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


def expert_layout(
    width: int,
    neurons: int,
    quantizations: Mapping[str, Quantization],
    *,
    slices: int = 1,
    package: Quantization | None = None,
    trigger_read_bytes: int | None = None,
    value_read_bytes: int | None = None,
) -> Layout:
    """Return the layout of experts that are stored as wholes, with Down by output, or of feed-forwards in slices.

    neurons: number of neurons of an expert, a multiple of `slices`
    quantizations: quantizations of gate, up and down in memory
    slices: number of clusters of a feed-forward
    package: the package's quantization; None: the gate's
    trigger_read_bytes, value_read_bytes: see `Layout`; whole pages; None: experts are in bundles.bin, as in memory
    """
    package, places, ends = package or quantizations["gate"], [], {"trigger": 0, "value": 0}
    of_slice = neurons // slices
    for name, quantization in quantizations.items():
        part: Part = "trigger" if name == "gate" else "value"
        rows, columns = (width, of_slice) if name == "down" else (of_slice, width)
        quants = ends[part]
        scales = quants + _in_lines(rows * quant_bytes(quantization, columns))
        ends[part] = scales + _in_lines(rows * scale_bytes(quantization, columns))
        differing = None if quantization == package else quantization
        places.append(MatrixPlace(name, part, quants, part, scales, differing))
    return Layout(
        cluster_neurons=of_slice,
        clusters=slices,
        trigger_part_bytes=trigger_read_bytes or pages(ends["trigger"]) * PAGE_BYTES,
        value_part_bytes=value_read_bytes or pages(ends["value"]) * PAGE_BYTES,
        block_neurons=of_slice,
        blocks=slices,
        neuron_order="source",
        matrices=tuple(places),
        down_by_output=True,
    )
