"""The memory of a run, measured from outside as proportional set sizes, so that shared pages count once in the sum.

For a proportional size the kernel walks page tables, which takes milliseconds per process with hundreds of megabytes
mapped. So the processes are scanned rarely. What grows in between are the segments, whose pages the kernel counts as
they come: a sample is the last scan plus the growth of the segments since.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence

from neuronpipe.protocol.memory.segments import BLOCK_BYTES
from neuronpipe.services.monitor.process_usage import ProcessMemory, process_memory

INTERVAL_S = 0.25
COST_FACTOR = 50  # a scan that takes 10 ms is repeated after 500 ms at the earliest
EARLY_S, EARLY_INTERVAL_S, EARLY_FACTOR = 1.0, 0.05, 10  # while memory fills up, and for short runs


def _without_segments(sizes: Sequence[ProcessMemory], segments_bytes: int) -> int:
    """Return the memory of the processes without the segments.

    Processes are scanned one after the other. A segment's page that another process begins to use in between would
    count one and a half times, so the shared part of each process is subtracted.

    segments_bytes: the size of the segments' pages, in place of shared parts that are not known
    """
    shared_sizes = [size.shared_bytes for size in sizes if size.shared_bytes is not None]
    total_bytes = sum(size.proportional_bytes for size in sizes)
    return max(0, total_bytes - (sum(shared_sizes) if len(shared_sizes) == len(sizes) else segments_bytes))


class MemoryUsage:
    """Samples the memory of a run, at a cost of a few percent of one core at most.

    segments: descriptors of the memory files that the processes share
    limit_bytes: a sample above it is repeated, because a scan takes time: a process may have freed memory of its start
        before the segments grew, and memory that was private before a fork counts again in the next process
    """

    def __init__(self, segments: Iterable[int], limit_bytes: int) -> None:
        self.current_bytes = 0
        self.peak_bytes = 0
        self.swapped_bytes = 0  # at the last scan
        self.due_at = 0.0
        self._segments, self._limit_bytes = tuple(segments), limit_bytes
        self._private_bytes = 0
        self._scan_at = 0.0
        self._began = time.monotonic()

    @property
    def is_early(self) -> bool:
        """True during the first second, in which memory fills up."""
        return time.monotonic() - self._began < EARLY_S

    def sample(self, pids: Sequence[int], *, scans: bool = True) -> None:
        """Measure the memory of these processes and of the segments.

        scans: whether private memory is measured as well, if a scan is due; it cannot grow while the processes sleep
        """
        before = time.monotonic()
        early = self.is_early
        if scans and before >= self._scan_at:
            self._scan(pids, EARLY_FACTOR if early else COST_FACTOR)
        current_bytes = self._private_bytes + self._segments_bytes()
        if current_bytes > max(self._limit_bytes, self.peak_bytes):
            self._scan(pids, EARLY_FACTOR if early else COST_FACTOR)
            current_bytes = self._private_bytes + self._segments_bytes()
        self.current_bytes = current_bytes
        self.peak_bytes = max(self.peak_bytes, current_bytes)
        self.due_at = time.monotonic() + (EARLY_INTERVAL_S if early else INTERVAL_S)

    def _segments_bytes(self) -> int:
        return sum(BLOCK_BYTES * os.fstat(descriptor).st_blocks for descriptor in self._segments)

    def _scan(self, pids: Sequence[int], rest_factor: float) -> None:
        """Scan the processes. The next scan is due after rest_factor times the duration of this one."""
        before = time.monotonic()
        segments_bytes, sizes = self._segments_bytes(), [process_memory(pid) for pid in pids]
        self._private_bytes = _without_segments(sizes, segments_bytes)
        self.swapped_bytes = sum(size.swapped_bytes for size in sizes)
        after = time.monotonic()
        self._scan_at = after + rest_factor * (after - before)
