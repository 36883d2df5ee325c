"""Processor time and memory of a run's processes, as the kernel reports them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_SIZES = re.compile(rb"^(Pss|Pss_Shmem|SwapPss):\s+(\d+) kB", re.MULTILINE)
OVER_S = 1.0
MEMORY_EVERY_S = 0.5  # the kernel walks page tables for each figure, so one process at a time


class Processes:
    """Samples of processor time and memory by process id."""

    def __init__(self) -> None:
        self._times: dict[int, list[tuple[float, float]]] = {}
        self._memory: dict[int, int] = {}
        self._memory_at = float("-inf")
        self._turn = 0

    def sample(self, pids: Iterable[int], now_s: float) -> None:
        """Sample the processor time of all these processes and drop the samples of others.

        Memory is sampled for processes without a sample, and else for the next process every MEMORY_EVERY_S.

        pids: zeros are ignored
        """
        live = [pid for pid in pids if pid]
        self._times = {pid: self._times.get(pid, []) for pid in live}
        self._memory = {pid: size for pid, size in self._memory.items() if pid in self._times}
        for pid, times in self._times.items():
            used_s = processor_s(pid)
            if used_s is not None:
                times.append((now_s, used_s))
                while len(times) > 2 and times[1][0] <= now_s - OVER_S:
                    times.pop(0)
        unseen = [pid for pid in live if pid not in self._memory]
        if live and (unseen or now_s - self._memory_at >= MEMORY_EVERY_S):
            for pid in unseen or live[self._turn % len(live) :][:1]:
                total, shared, _ = process_memory(pid)
                self._memory[pid] = total - (shared or 0)
            self._turn += 1
            self._memory_at = now_s

    def cpu(self, pid: int) -> float | None:
        """Return how many cores the process used over about OVER_S; None before two samples."""
        times = self._times.get(pid, [])
        if len(times) < 2 or times[-1][0] <= times[0][0]:
            return None
        return (times[-1][1] - times[0][1]) / (times[-1][0] - times[0][0])

    def memory_bytes(self, pid: int) -> int | None:
        """Return the memory in bytes without shared memory; None before the first sample."""
        return self._memory.get(pid)


def processor_s(pid: int) -> float | None:
    """Return the processor time of a process in seconds, over all threads; None if it cannot be read."""
    import psutil  # the supervisor imports this module and needs only `process_memory`

    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)


class ProcessMemory(NamedTuple):
    """The memory of one process. A page that n processes share counts 1/n.

    proportional_bytes: pages in memory, shared_bytes included
    shared_bytes: pages of shared memory; None before Linux 5.4
    """

    proportional_bytes: int
    shared_bytes: int | None
    swapped_bytes: int


def process_memory(pid: int) -> ProcessMemory:
    """Return the memory of a process; zeros if it does not exist or cannot be read.

    It reads smaps_rollup itself, because psutil does not report which part is shared memory.
    """
    try:
        sizes = dict(_SIZES.findall(Path(f"/proc/{pid}/smaps_rollup").read_bytes()))
    except OSError:
        return ProcessMemory(0, 0, 0)
    total, shared, swapped = (
        None if size is None else 1024 * int(size) for size in map(sizes.get, (b"Pss", b"Pss_Shmem", b"SwapPss"))
    )
    return ProcessMemory(total or 0, shared if sizes else 0, swapped or 0)


def helpers_of(pids: Iterable[int]) -> list[int]:
    """Return the ids of the child processes of these processes; none if the kernel does not list them."""
    helpers: list[int] = []
    for pid in pids:
        with contextlib.suppress(OSError):
            helpers += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_bytes().split())
    return helpers
