"""Measuring memory: how fast it is read, end to end and in pieces, by one thread and by all decode cores.

The reading itself is native and gives the Python lock away, so that threads of this process stand in for the workers.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.plans.device.crew import Member, Told, Work, measured_together, nobody_told
from neuronpipe.plans.device.device import MemorySpeed, PiecePoint
from neuronpipe.plans.device.figures import Figure
from neuronpipe.plans.device.points import SEQUENTIAL_PIECE_BYTES, DramPoint

STRETCH_BYTES = 8 << 20  # of memory, between two looks at the clock
PIECE_BYTES = (1024, 2304, 4096, 6912)  # 2304: a gate of a 7B model at q4; 6912: its whole bundle
PROFILE_PIECES = (SEQUENTIAL_PIECE_BYTES, *PIECE_BYTES)
EVERY = 8  # a piece of so many is read: about the share of a layer's neurons that fire
ROUNDS, MAX_ROUNDS = 3, 6
NOISE = 0.1  # between the best two rounds
MIN_BYTES, MAX_BYTES = 64 << 20, 256 << 20  # well beyond the caches of phones and of most servers
BRIEF_BUDGET_S, FULL_BUDGET_S = 0.25, 1.0
HUGE_PAGE_BYTES = 2 << 20


def measure_memory(cores: Sequence[int | None], available_bytes: int, *, brief: bool) -> MemorySpeed | None:
    """The speeds, with a thread on each of `cores` (None: anywhere), in BRIEF_BUDGET_S or FULL_BUDGET_S (up to twice
    that while they are not steady), besides touching the memory once; None when a sixteenth of what is available is too
    little to measure on.

    Each figure is the best of a few rounds: what else runs here can only make it smaller.
    """
    memory = _touched(MAX_BYTES // 2 if brief else MAX_BYTES, available_bytes)
    if memory is None:
        return None
    pointer, size = memory
    budget_s = (BRIEF_BUDGET_S if brief else FULL_BUDGET_S) / (2 + len(PIECE_BYTES)) / ROUNDS

    spreads: list[float] = []

    def speed(places: Sequence[int | None], piece_bytes: int, every: int) -> float:
        best, spread = best_of(lambda: _speed(pointer, size, places, piece_bytes, every, budget_s))
        spreads.append(spread)
        return best

    return MemorySpeed(
        threads=len(cores),
        one_thread_bytes_per_s=speed(cores[:1], SEQUENTIAL_PIECE_BYTES, 1),
        sequential_bytes_per_s=speed(cores, SEQUENTIAL_PIECE_BYTES, 1),
        pieces=tuple(
            PiecePoint(piece_bytes=piece_bytes, bytes_per_s=speed(cores, piece_bytes, EVERY))
            for piece_bytes in PIECE_BYTES
        ),
        spread=round(max(spreads), 3),
    )


def measure_dram(
    cores: Sequence[int | None],
    available_bytes: int,
    *,
    rounds: int,
    budget_s: float,
    progress: Told = nobody_told,
) -> tuple[DramPoint, ...]:
    """The same for the device profile: by number of workers, from one to one on each of `cores`. Workers are processes;
    a speed is that of the typical stretch, so that one in which the system did something else does not count.
    Nothing, where there is too little memory."""
    memory = _touched(MAX_BYTES, available_bytes)
    if memory is None:
        return ()
    found: dict[tuple[int, int], list[float]] = {}
    for workers in range(1, len(cores) + 1):
        work = _stretches(*memory, rounds, budget_s)
        turns = (piece_bytes for _ in range(rounds) for piece_bytes in PROFILE_PIECES)
        for piece_bytes, speeds in zip(turns, measured_together(cores[:workers], work, progress), strict=True):
            found.setdefault((workers, piece_bytes), []).append(sum(of_one[0] for of_one in speeds))
    return tuple(
        DramPoint(workers=workers, piece_bytes=piece_bytes, bytes_per_s=Figure.of(speeds))
        for (workers, piece_bytes), speeds in found.items()
    )


def _stretches(memory: Any, memory_bytes: int, rounds: int, budget_s: float) -> Work:
    """Read a worker's part in stretches, other pieces of it each time it begins again."""

    def work(member: Member) -> Iterator[Sequence[float]]:
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


def best_of(measure: Callable[[], float]) -> tuple[float, float]:
    """The best of some rounds, and how far the second best is below it; of more rounds while that is far."""
    speeds = sorted(measure() for _ in range(ROUNDS))
    while len(speeds) < MAX_ROUNDS and speeds[-2] < (1 - NOISE) * speeds[-1]:
        speeds = sorted([*speeds, measure()])
    return speeds[-1], 1 - speeds[-2] / speeds[-1]


def _speed(
    memory: Any, memory_bytes: int, cores: Sequence[int | None], piece_bytes: int, every: int, budget_s: float
) -> float:
    """Bytes per second of all threads together, each over its own part of the memory, again and again. The threads look
    at the clock: this one may come to its turn on a busy machine when they have read everything."""
    share_bytes = memory_bytes // len(cores) // 64 * 64
    read = [0] * len(cores)
    began, ended = [0.0] * len(cores), [0.0] * len(cores)
    gate = threading.Barrier(len(cores))

    def reader(number: int) -> Callable[[], None]:
        def run() -> None:
            core = cores[number]
            if core is not None:
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(0, {core})  # of this thread alone
            seen = ffi.new("uint64_t *")
            turn = 0
            gate.wait()
            began[number] = ended[number] = time.perf_counter()
            while ended[number] < began[number] + budget_s:
                read[number] += lib.np_probe_read(
                    memory + number * share_bytes, share_bytes, piece_bytes, every, turn, seen
                )
                turn += 1
                ended[number] = time.perf_counter()

        return run

    threads = [threading.Thread(target=reader(number)) for number in range(len(cores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(read) / (max(ended) - min(began))
