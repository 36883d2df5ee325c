"""Weight slots for kernel benchmarks: laid out as in a run, in memory that processes share.

The memory is larger than the caches of most machines, and in huge pages where the slots of runs are. Its weights are
meaningless: all bytes are equal, and as a scale they are a small number.
"""

from __future__ import annotations

import os
import random
import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neuronpipe.native import ROW_TYPES, ffi
from neuronpipe.native.huge_mapping import HugeMapping, collapse
from neuronpipe.plans.package.layout import Layout, Quantization, compute_layout, quant_bytes, row_bytes, scale_bytes
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.memory.segments import create_memory_file

WEIGHT_BYTE = 0x11
MIN_BYTES, MAX_BYTES = 64 << 20, 1 << 30
USUAL_BYTES = 256 << 20
WORKER_BYTES = 16 << 20  # minimum for each worker: room for a block of the widest measured neurons
CACHES = 4  # size relative to the largest cache, if enough memory is available
NEURONS_PER_WEIGHT = 3.5  # neurons of a layer relative to its width, as in common models; it decides the blocks' size


@frozen
class BenchmarkMemory:
    """Memory that was mapped as shared, before the processes that use it are forked."""

    content: memoryview

    @property
    def pointer(self) -> Any:
        return ffi.from_buffer("uint8_t[]", self.content)


def allocate_benchmark_memory(
    available_bytes: int, cache_bytes: int, workers: int, *, usual_bytes: int = USUAL_BYTES
) -> BenchmarkMemory | None:
    """Allocate memory that is larger than the caches; None if a sixteenth of the available memory is too little.

    usual_bytes: size, unless caches are large or little memory is available
    """
    target_bytes = min(MAX_BYTES, max(usual_bytes, CACHES * cache_bytes))
    size_bytes = min(target_bytes, available_bytes // 16) // MIN_BYTES * MIN_BYTES
    if size_bytes < max(MIN_BYTES, workers * WORKER_BYTES):
        return None
    file = create_memory_file("benchmark")
    try:
        os.ftruncate(file, size_bytes)
        content = HugeMapping(file, size_bytes, writable=True).content
    finally:
        os.close(file)
    collapse(content)
    weights = bytes([WEIGHT_BYTE]) * MIN_BYTES
    for offset in range(0, size_bytes, MIN_BYTES):
        content[offset : offset + MIN_BYTES] = weights
    return BenchmarkMemory(content)


def largest_cache_bytes(root: Path) -> int:
    """Return the size of the first processor's largest cache; 0 if unknown.

    root: folder in place of "/"
    """
    sizes_bytes = [0]
    for file in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            match = re.fullmatch(r"([0-9]+)([KM])", file.read_text(encoding="ascii").strip())
        except (OSError, ValueError):
            continue
        if match:
            sizes_bytes.append(int(match[1]) << (10 if match[2] == "K" else 20))
    return max(sizes_bytes)


@frozen
class Rows:
    """Scattered rows, in the form that kernels take.

    type: native type of the rows
    quants, scales: arrays of pointers, one for each row
    fetch: what the kernel prefetches with each row
    keep: objects to which the others point
    """

    type: int
    quants: Any
    scales: Any
    count: int
    fetch: Any
    keep: tuple[object, ...]


class Neurons:
    """Neurons of one quantization and width, in slots that fill `size_bytes` of memory from address `start` on.

    Quantization q3 applies to gates only; the value parts are then q4.

    type, trigger_type: native types of value rows, and of gate rows
    row_bytes, trigger_row_bytes: their sizes
    blocks: number of whole blocks that fit
    """

    def __init__(self, quantization: Quantization, row_weights: int, start: int, size_bytes: int) -> None:
        gates: Quantization = quantization
        quantization = "q4" if gates == "q3" else gates
        self.type, self.row_weights = ROW_TYPES[quantization], row_weights
        self.trigger_type = ROW_TYPES[gates]
        self.row_bytes, self.trigger_row_bytes = row_bytes(quantization, row_weights), row_bytes(gates, row_weights)
        neurons = int(NEURONS_PER_WEIGHT * row_weights)
        matrices = ("gate", "up", "down")
        self._layout: Layout = compute_layout(
            quantization, row_weights, neurons, matrices, "frequency", differing={"gate": gates}
        )
        self._trigger_quant_bytes = quant_bytes(gates, row_weights)
        self._quant_bytes, self._scale_bytes = (
            quant_bytes(quantization, row_weights),
            scale_bytes(quantization, row_weights),
        )
        self._slot_bytes = {
            part: self._layout.slot_bytes(part, quantization, row_weights) for part in ("trigger", "value")
        }
        clusters = size_bytes // sum(self._slot_bytes.values())
        self.block_neurons = self._layout.block_neurons
        self.blocks = clusters // self._layout.block_clusters
        self._start = {"trigger": start, "value": start + clusters * self._slot_bytes["trigger"]}
        self._one_neuron_slots = self._layout.cluster_neurons == 1
        self._shuffled: dict[int, array[int]] = {}

    def whole_block(self, block: int) -> range:
        """Return the numbers of all neurons of a block."""
        return range(block * self.block_neurons, (block + 1) * self.block_neurons)

    def sample_block(self, block: int, share: float, turn: int) -> list[int]:
        """Return about this share of a block's neurons, ascending.

        The neurons are the same for the same arguments, and different in each of 1 / share turns.
        """
        count = max(1, round(share * self.block_neurons))
        if (shuffled := self._shuffled.get(block)) is None:
            neurons = random.Random(block).sample(self.whole_block(block), self.block_neurons)
            shuffled = self._shuffled[block] = array("Q", neurons)  # of 8 bytes a neuron, for all turns and cases
        return sorted(shuffled[turn * count : (turn + 1) * count])

    def rows(self, matrix: int, neurons: Sequence[int]) -> Rows:
        """Return the rows of these neurons in a matrix (0: Gate, 1: Up, 2: Down).

        As in the engine, Up rows prefetch Down rows, and rows of Gate a whole slot if it has one neuron.
        """
        place, down = self._layout.matrices[matrix], self._layout.matrices[2]
        quants = self._addresses(neurons, place.part, place.quants, self._quants_bytes_of(matrix))
        scales = self._addresses(neurons, place.scales_part, place.scales, self._scale_bytes)
        prefetched = self._addresses(neurons, down.part, down.quants, self._quant_bytes) if matrix == 1 else array("Q")
        fetch = ffi.new(
            "np_fetch *",
            {
                "row_bytes": self._slot_bytes[place.part] if self._one_neuron_slots and matrix == 0 else 0,
                "prefetch": _pointers(prefetched) if matrix == 1 else ffi.NULL,
                "prefetch_bytes": self._quant_bytes,
            },
        )
        type_ = self.trigger_type if matrix == 0 else self.type
        return Rows(type_, _pointers(quants), _pointers(scales), len(quants), fetch, (quants, scales, prefetched))

    def _quants_bytes_of(self, matrix: int) -> int:
        return self._trigger_quant_bytes if matrix == 0 else self._quant_bytes

    def _addresses(self, neurons: Sequence[int], part: str, offset: int, row_bytes: int) -> array[int]:
        """Return where the rows of these neurons lie: at `offset` in the slots of their clusters, one behind the other.

        A profile needs millions of them, hence an expression without calls.
        """
        first, slot_bytes = self._start[part] + offset, self._slot_bytes[part]
        per_cluster = self._layout.cluster_neurons
        if per_cluster == 1:
            return array("Q", [first + neuron * slot_bytes for neuron in neurons])
        return array("Q", [first + n // per_cluster * slot_bytes + n % per_cluster * row_bytes for n in neurons])


def _pointers(addresses: array[int]) -> Any:
    return ffi.cast("const void **", ffi.from_buffer(addresses))
