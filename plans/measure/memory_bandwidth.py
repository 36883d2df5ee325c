"""Measuring memory: how fast it is read, end to end and in pieces, by one decode worker and by several."""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.device.measured_points import SEQUENTIAL_PIECE_BYTES, DramPoint
from neuronpipe.plans.measure.benchmark_processes import (
    BenchmarkProcess,
    OnMeasured,
    Work,
    ignore_progress,
    measure_together,
)

STRETCH_BYTES = 8 << 20  # of memory, between two looks at the clock
PIECE_BYTES = (1024, 2304, 4096, 6912)  # 2304: a gate of a 7B model at q4; 6912: its whole bundle
PROFILE_PIECES = (SEQUENTIAL_PIECE_BYTES, *PIECE_BYTES)
EVERY = 8  # a piece of so many is read: about the share of a layer's neurons that fire
MIN_BYTES, MAX_BYTES = 64 << 20, 256 << 20  # well beyond the caches of phones and of most servers
HUGE_PAGE_BYTES = 2 << 20


def measure_dram(
    cores: Sequence[int | None],
    available_bytes: int,
    *,
    rounds: int,
    budget_s: float,
    max_bytes: int = MAX_BYTES,
    counts: Sequence[int] = (),
    progress: OnMeasured = ignore_progress,
) -> tuple[DramPoint, ...]:
    """Return how fast memory is read, by number of workers: of these counts, else from one to one on each of `cores`
    (None: anywhere). Workers are processes; a speed is that of the typical stretch, so that one in which the system did
    something else does not count. max_bytes: of memory to read. Nothing, where a sixteenth of what is available is too
    little.
    """
    memory = _touched(max_bytes, available_bytes)
    if memory is None:
        return ()
    found: dict[tuple[int, int], list[float]] = {}
    for workers in counts or range(1, len(cores) + 1):
        work = _stretches(*memory, rounds, budget_s)
        turns = (piece_bytes for _ in range(rounds) for piece_bytes in PROFILE_PIECES)
        for piece_bytes, speeds in zip(turns, measure_together(cores[:workers], work, progress), strict=True):
            found.setdefault((workers, piece_bytes), []).append(sum(of_one[0] for of_one in speeds))
    return tuple(
        DramPoint(workers=workers, piece_bytes=piece_bytes, bytes_per_s=Figure.of(speeds))
        for (workers, piece_bytes), speeds in found.items()
    )


def _stretches(memory: Any, memory_bytes: int, rounds: int, budget_s: float) -> Work:
    """Read a worker's part in stretches, other pieces of it each time it begins again."""

    def work(member: BenchmarkProcess) -> Iterator[Sequence[float]]:
        stretches = memory_bytes // member.count // STRETCH_BYTES
        start = memory + member.index * stretches * STRETCH_BYTES
        seen = ffi.new("uint64_t *")
        lib.np_probe_read(start, stretches * STRETCH_BYTES, 4096, 1, 0, seen)  # the first touch by this process
        turn = 0
        for _ in range(rounds):
            for piece_bytes in PROFILE_PIECES:
                member.meet()
                every = 1 if piece_bytes == SEQUENTIAL_PIECE_BYTES else EVERY
                speeds: list[float] = []
                until = time.perf_counter() + budget_s
                while time.perf_counter() < until or not speeds:
                    again, stretch = divmod(turn, stretches)
                    began = time.perf_counter()
                    place = start + stretch * STRETCH_BYTES
                    read_bytes = lib.np_probe_read(place, STRETCH_BYTES, piece_bytes, every, again, seen)
                    speeds.append(read_bytes / (time.perf_counter() - began))
                    turn += 1
                yield [statistics.median(speeds)]

    return work


def _touched(most_bytes: int, available_bytes: int) -> tuple[Any, int] | None:
    """Memory in huge pages, and its size: a sixteenth of what is available at most; None where that is too little."""
    size = min(most_bytes, available_bytes // 16) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if size < MIN_BYTES:
        return None
    memory = mmap.mmap(-1, size)
    pointer = ffi.from_buffer("uint8_t[]", memory)
    lib.np_memory_advise_huge(pointer, size)
    memory[::4096] = b"\1" * (size // 4096)  # pages that nobody has written are all the same page of zeros
    return pointer, size
