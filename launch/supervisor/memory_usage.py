"""How much memory a run takes, as seen from outside: proportional set sizes, so that shared pages count once in the
sum.

The kernel walks page tables to tell a proportional size, milliseconds per process with hundreds of megabytes mapped, so
that this is asked rarely. What grows in between are the segments, whose pages it counts as they come: a sample is the
last scan, and what the segments have grown by since.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence

from neuronpipe.protocol.segments import BLOCK_BYTES
from neuronpipe.services.monitor.process_usage import ProcessMemory, process_memory

INTERVAL_S = 0.25
COST_FACTOR = 50  # a scan that takes 10 ms is made every 500 ms at most
EARLY_S, EARLY_INTERVAL_S, EARLY_FACTOR = 1.0, 0.05, 10  # while a run fills up, and for runs that are over soon


def _without_segments(sizes: Sequence[ProcessMemory], held_bytes: int) -> int:
    """What processes take besides the segments. Processes are scanned one after the other: a page of a segment that a
    second one begins to use in between would count half as much again, so that shared memory is left out of the sum."""
    shared = [one.shared_bytes for one in sizes if one.shared_bytes is not None]
    total = sum(one.proportional_bytes for one in sizes)
    return max(0, total - (sum(shared) if len(shared) == len(sizes) else held_bytes))


class MemoryUsage:
    """Samples the sum over processes now and then, at a cost of a few percent of one core at most. segments: the
    descriptors of the memory files that the processes share. limit_bytes: what seems to be above it is looked at again,
    for a scan is no moment: a process may have given back what it needed to start before the segments grew, and what
    one had alone before a fork counts again in the next one."""

    def __init__(self, segments: Iterable[int], limit_bytes: int) -> None:
        self.current_bytes = 0
        self.peak_bytes = 0
        self.swapped_bytes = 0  # at the last scan
        self.due_at = 0.0
        self._segments, self._limit_bytes = tuple(segments), limit_bytes
        self._others_bytes = 0
        self._scan_at = 0.0
        self._began = time.monotonic()

    @property
    def is_early(self) -> bool:
        """True while the run fills up."""
        return time.monotonic() - self._began < EARLY_S

    def sample(self, pids: Sequence[int], *, scans: bool = True) -> None:
        """Measure. scans: also what processes have to themselves, which cannot grow while they sleep."""
        before = time.monotonic()
        early = self.is_early
        if scans and before >= self._scan_at:
            self._scan(pids, EARLY_FACTOR if early else COST_FACTOR)
        current_bytes = self._others_bytes + self._held_bytes()
        if current_bytes > max(self._limit_bytes, self.peak_bytes):
            self._scan(pids, EARLY_FACTOR if early else COST_FACTOR)
            current_bytes = self._others_bytes + self._held_bytes()
        self.current_bytes = current_bytes
        self.peak_bytes = max(self.peak_bytes, current_bytes)
        self.due_at = time.monotonic() + (EARLY_INTERVAL_S if early else INTERVAL_S)

    def _held_bytes(self) -> int:
        return sum(BLOCK_BYTES * os.fstat(descriptor).st_blocks for descriptor in self._segments)

    def _scan(self, pids: Sequence[int], rest_factor: float) -> None:
        """Walk the processes; not again before rest_factor times as long as it took."""
        before = time.monotonic()
        held_bytes, scanned = self._held_bytes(), [process_memory(pid) for pid in pids]
        self._others_bytes = _without_segments(scanned, held_bytes)
        self.swapped_bytes = sum(one.swapped_bytes for one in scanned)
        after = time.monotonic()
        self._scan_at = after + rest_factor * (after - before)
