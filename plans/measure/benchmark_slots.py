"""Memory to compute on while the kernels are measured: slots as a run has them, in memory that processes share.

The arena is larger than the caches of most machines. What lies in it are weights that mean nothing: every byte is the
same, which as a scale is a small number.
"""

from __future__ import annotations

import mmap
import random
import re
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.plans.package.layout import Layout, Quantization, compute_layout, quant_bytes, row_bytes, scale_bytes
from neuronpipe.protocol.frozen import frozen

WEIGHT_BYTE = 0x11
MIN_BYTES, MAX_BYTES = 64 << 20, 1 << 30
USUAL_BYTES = 256 << 20
WORKER_BYTES = 16 << 20  # a block of the widest neurons that are measured fits
CACHES = 4  # as large as so many of the largest cache, where memory allows
NATIVE_TYPES = {"f16": lib.NP_F16, "q8": lib.NP_Q8, "q4": lib.NP_Q4, "q3": lib.NP_Q3}
NEURONS_PER_WEIGHT = 3.5  # of a layer, by its width: so that blocks are as large as in common models


@frozen
class Arena:
    """Some memory, mapped shared before any fork."""

    memory: mmap.mmap

    @property
    def pointer(self) -> Any:
        """Its first byte."""
        return ffi.from_buffer("uint8_t[]", self.memory)


def make_arena(available_bytes: int, cache_bytes: int, workers: int, *, usual_bytes: int = USUAL_BYTES) -> Arena | None:
    """An arena beyond the caches, of a sixteenth of what is available at most; None where that is too little."""
    wanted = min(MAX_BYTES, max(usual_bytes, CACHES * cache_bytes))
    size = min(wanted, available_bytes // 16) // MIN_BYTES * MIN_BYTES
    if size < max(MIN_BYTES, workers * WORKER_BYTES):
        return None
    memory = mmap.mmap(-1, size)
    ffi.memmove(memory, bytes([WEIGHT_BYTE]) * MIN_BYTES, MIN_BYTES)
    for at in range(MIN_BYTES, size, MIN_BYTES):
        ffi.memmove(ffi.from_buffer(memory)[at : at + MIN_BYTES], ffi.from_buffer(memory)[0:MIN_BYTES], MIN_BYTES)
    return Arena(memory)


def largest_cache_bytes(root: Path) -> int:
    """Of the first processor's caches; 0: not known."""
    found = [0]
    for size in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            match = re.fullmatch(r"([0-9]+)([KM])", size.read_text(encoding="ascii").strip())
        except (OSError, ValueError):
            continue
        if match:
            found.append(int(match[1]) << (10 if match[2] == "K" else 20))
    return max(found)


@frozen
class Rows:
    """Rows that lie anywhere, as the scattered kernels take them. type: theirs; fetch: what is fetched with each."""

    type: int
    quants: Any
    scales: Any
    count: int
    fetch: Any
    keep: tuple[object, ...]


class Neurons:
    """The neurons of one quantization and width in a stretch of memory: their slots, and lists of their rows. q3 is
    that of the gates, beside q4 values."""

    def __init__(self, quantization: Quantization, row_weights: int, start: int, size_bytes: int) -> None:
        gates: Quantization = quantization
        quantization = "q4" if gates == "q3" else gates
        self.type, self.row_weights = NATIVE_TYPES[quantization], row_weights
        self.trigger_type = NATIVE_TYPES[gates]
        self.row_bytes, self.trigger_row_bytes = row_bytes(quantization, row_weights), row_bytes(gates, row_weights)
        neurons = int(NEURONS_PER_WEIGHT * row_weights)
        matrices = ("gate", "up", "down")
        self._layout: Layout = compute_layout(quantization, row_weights, neurons, matrices, "frequency", gates=gates)
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
        self._own_slot = self._layout.cluster_neurons == 1

    def whole_block(self, block: int) -> range:
        """All neurons of a block."""
        return range(block * self.block_neurons, (block + 1) * self.block_neurons)

    def some_of(self, block: int, share: float, turn: int) -> list[int]:
        """About this share of a block's neurons, ascending; others in each of 1 / share turns, always the same."""
        count = max(1, round(share * self.block_neurons))
        all_of_it = random.Random(block).sample(self.whole_block(block), self.block_neurons)
        return sorted(all_of_it[turn * count : (turn + 1) * count])

    def rows(self, matrix: int, neurons: Iterable[int]) -> Rows:
        """Rows of a matrix (0: gate, 1: up, 2: down). As the engine does it, the rows of Down are fetched with those of
        Up."""
        place, per_cluster = self._layout.matrices[matrix], self._layout.cluster_neurons
        own_bytes = self._trigger_quant_bytes if matrix == 0 else self._quant_bytes
        down = self._layout.matrices[2]
        quants, scales, beside = array("Q"), array("Q"), array("Q")
        for neuron in neurons:
            cluster, row = divmod(neuron, per_cluster)
            quants.append(self._slot(place.part, cluster) + place.quants + row * own_bytes)
            scales.append(self._slot(place.scales_part, cluster) + place.scales + row * self._scale_bytes)
            beside.append(self._slot(down.part, cluster) + down.quants + row * self._quant_bytes)
        fetch = ffi.new(
            "np_fetch *",
            {
                "row_bytes": self._slot_bytes[place.part] if self._own_slot and matrix == 0 else 0,
                "prefetch": _pointers(beside) if matrix == 1 else ffi.NULL,
                "prefetch_bytes": self._quant_bytes,
            },
        )
        type_ = self.trigger_type if matrix == 0 else self.type
        return Rows(type_, _pointers(quants), _pointers(scales), len(quants), fetch, (quants, scales, beside))

    def _slot(self, part: str, cluster: int) -> int:
        return self._start[part] + cluster * self._slot_bytes[part]


def _pointers(addresses: array[int]) -> Any:
    return ffi.cast("const void **", ffi.from_buffer(addresses))
