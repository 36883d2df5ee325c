"""Measurement of the speed of reading memory, sequentially and in pieces, by one worker and by several."""

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

STRETCH_BYTES = 8 << 20  # memory between two readings of the clock
PIECE_BYTES = (1024, 2304, 4096, 6912)  # 2304: a gate of a 7B model at q4; 6912: its whole bundle
PROFILE_PIECES = (SEQUENTIAL_PIECE_BYTES, *PIECE_BYTES)
EVERY = 8  # one piece of this many is read, since about this share of a layer's neurons fires
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
    """Measure the speed at which workers together read memory. () if a sixteenth of the available memory is too little.

    Workers are processes. A speed is that of the median stretch, so that interrupted stretches do not count.

    cores: the core of each worker (None: not pinned)
    budget_s: time for a repetition
    counts: numbers of workers to measure with (default: 1 to len(cores))
    """
    memory = _allocate_written(max_bytes, available_bytes)
    if memory is None:
        return ()
    speeds_of: dict[tuple[int, int], list[float]] = {}
    for workers in counts or range(1, len(cores) + 1):
        work = _stretches(*memory, rounds, budget_s)
        turns = (piece_bytes for _ in range(rounds) for piece_bytes in PROFILE_PIECES)
        for piece_bytes, speeds in zip(turns, measure_together(cores[:workers], work, progress), strict=True):
            speeds_of.setdefault((workers, piece_bytes), []).append(sum(worker_speeds[0] for worker_speeds in speeds))
    return tuple(
        DramPoint(workers=workers, piece_bytes=piece_bytes, bytes_per_s=Figure.of(speeds))
        for (workers, piece_bytes), speeds in speeds_of.items()
    )


def _stretches(memory: Any, memory_bytes: int, rounds: int, budget_s: float) -> Work:
    """Return the work of a worker: to read its part of the memory in stretches, other pieces of it in each pass."""

    def work(process: BenchmarkProcess) -> Iterator[Sequence[float]]:
        stretches = memory_bytes // process.count // STRETCH_BYTES
        start = memory + process.index * stretches * STRETCH_BYTES
        checksum = ffi.new("uint64_t *")
        lib.np_probe_read(start, stretches * STRETCH_BYTES, 4096, 1, 0, checksum)  # the first touch by this process
        turn = 0
        for _ in range(rounds):
            for piece_bytes in PROFILE_PIECES:
                process.meet()
                every = 1 if piece_bytes == SEQUENTIAL_PIECE_BYTES else EVERY
                speeds: list[float] = []
                deadline = time.perf_counter() + budget_s
                while time.perf_counter() < deadline or not speeds:
                    pass_number, stretch = divmod(turn, stretches)
                    began = time.perf_counter()
                    address = start + stretch * STRETCH_BYTES
                    read_bytes = lib.np_probe_read(address, STRETCH_BYTES, piece_bytes, every, pass_number, checksum)
                    speeds.append(read_bytes / (time.perf_counter() - began))
                    turn += 1
                yield [statistics.median(speeds)]

    return work


def _allocate_written(max_bytes: int, available_bytes: int) -> tuple[Any, int] | None:
    """Return memory in huge pages, which was written, and its size.

    The size is at most a sixteenth of the available memory; None if that is too little.
    """
    size_bytes = min(max_bytes, available_bytes // 16) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if size_bytes < MIN_BYTES:
        return None
    memory = mmap.mmap(-1, size_bytes)
    pointer = ffi.from_buffer("uint8_t[]", memory)
    lib.np_memory_advise_huge(pointer, size_bytes)
    memory[::4096] = b"\1" * (size_bytes // 4096)  # unwritten pages all map to one page of zeros
    return pointer, size_bytes
