"""Measurement of flash: the native reader reads a package's file, for a few milliseconds for each point.

The package's file lies on the storage and file system, and is read with the direct I/O, that the loader will use.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.plans.device.cores import Kind
from neuronpipe.plans.device.device import FlashCurve, FlashPoint
from neuronpipe.plans.device.measured_figures import measure_in_turns, spread_of
from neuronpipe.plans.device.measured_points import CoreClass, FlashRead
from neuronpipe.plans.measure.benchmark_processes import OnMeasured, ignore_progress
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

KIB = 1 << 10
# (request_bytes, depth). Several reads in flight show the storage's throughput, single ones the cost of a miss. Depths
# above one have several sizes, since the fixed cost of a read is computed from their difference. Single reads of whole
# experts, of which a token may wait for a few only, need a large size: 4 KiB alone made them 30 times too slow.
BRIEF_POINTS = (
    *((size * KIB, 1) for size in (4, 256)),
    *((size * KIB, depth) for depth in (32, 128) for size in (4, 8, 64)),
    (256 * KIB, 32),
)
BRIEF_BUDGET_S = 0.24
FULL_POINTS = tuple(
    (size * KIB, depth) for size in (4, 8, 64, 256, 1024) for depth in (1, 8, 32, 128) if size * depth <= 32 * KIB
)
FULL_BUDGET_S = 1.0
ROUNDS, MAX_MORE_ROUNDS = 3, 3  # repetitions of each point; maximum of further ones for unsteady points
NOISE = 0.15  # a point is unsteady if its spread is larger
# In a smaller file, reads fall on the same few blocks and the storage's own cache answers.
MIN_FILE_BYTES = 1 << 20
MIN_PLACES = 8  # a size is measured only if the file holds this many reads of it


# Ranges of the file to read in, besides the whole file: storage may be faster where its cached mapping covers a range.
RANGES_BYTES = (128 << 20, 512 << 20)
PROFILE_SIZES = tuple(size * KIB for size in (4, 8, 16, 64, 256, 1024))
PROFILE_DEPTHS = (1, 8, 32, 128)
SEQUENTIAL_DEPTHS = (1, 8, 32)
# Measured for each class of cores that issue reads.
CLASS_POINTS = tuple((size * KIB, depth) for size in (4, 16, 64, 256) for depth in (1, 32))
MAX_IN_FLIGHT_BYTES = 32 << 20


@frozen
class ReadCase:
    """One point to measure for a device profile: see FlashRead."""

    request_bytes: int
    depth: int
    range_bytes: int
    sequential: bool = False
    kind: Kind | None = None  # class of the core that issues the reads
    core: int | None = None  # its id; None: not pinned


def read_cases(file_bytes: int, cores: Sequence[CoreClass]) -> tuple[ReadCase, ...]:
    """Return the cases to measure in a file of this size. They include each core class if there are several."""
    sizes = [size for size in PROFILE_SIZES if MIN_PLACES * size <= file_bytes]
    ranges = [size for size in RANGES_BYTES if size < file_bytes] + [file_bytes]
    cases = [
        ReadCase(size, depth, range_bytes)
        for range_bytes in ranges
        for depth in PROFILE_DEPTHS
        for size in sizes
        if size * depth <= MAX_IN_FLIGHT_BYTES
    ]
    cases += [ReadCase(size, depth, file_bytes, sequential=True) for depth in SEQUENTIAL_DEPTHS for size in sizes]
    cases += [
        ReadCase(size, depth, file_bytes, kind=core_class.kind, core=core_class.measured)
        for core_class in (cores if len(cores) > 1 else ())
        for size, depth in CLASS_POINTS
        if size in sizes
    ]
    return tuple(cases)


def measure_reads(
    path: Path,
    cases: Sequence[ReadCase],
    *,
    rounds: int,
    budget_s: float,
    progress: OnMeasured = ignore_progress,
) -> tuple[str, bool, tuple[FlashRead, ...]]:
    """Measure the cases. Return the reader's engine, True if it uses direct I/O, and the points.

    Raises UserError if the file cannot be read.

    budget_s: time for a repetition
    """
    reader = open_reader(path, max(case.depth for case in cases))
    allowed = os.sched_getaffinity(0)
    memory = read_buffers(reader, max(case.request_bytes * case.depth for case in cases))

    def measure_case(case: ReadCase) -> float:
        if case.core is not None:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, {case.core})
        try:
            range_bytes, size, depth = case.range_bytes, case.request_bytes, case.depth
            return _measure_point(
                reader, path, memory, size, depth, budget_s, range_bytes=range_bytes, sequential=case.sequential
            )
        finally:
            if case.core is not None:
                os.sched_setaffinity(0, allowed)
            progress(1)

    try:
        figures = measure_in_turns(cases, measure_case, rounds)
        engine, direct = ffi.string(lib.np_reader_engine(reader)).decode(), bool(lib.np_reader_direct(reader))
    finally:
        lib.np_reader_close(reader)
    points = (
        FlashRead(
            request_bytes=case.request_bytes,
            depth=case.depth,
            range_bytes=case.range_bytes,
            sequential=case.sequential,
            core=case.kind,
            bytes_per_s=figure,
        )
        for case, figure in figures.items()
    )
    return engine, direct, tuple(points)


def open_reader(path: Path, depth: int) -> Any:
    """Open a file with the native reader, as the loader does. Raises UserError.

    depth: maximum of reads in flight
    """
    error = ffi.new("int *")
    reader = lib.np_reader_open(os.fsencode(path), ffi.NULL, depth, error)
    if reader == ffi.NULL:
        raise UserError(f"{path}: cannot be opened ({os.strerror(error[0])}); check the path and its permissions")
    return reader


def read_buffers(reader: Any, size_bytes: int) -> Any:
    """Return touched memory for reads, as the loader's staging is: in huge pages if possible, and registered.

    A virtual machine's storage was 1.2 to 2.8 times as fast into huge pages (tests/bench/results, planned right after a
    clone).
    """
    mapped = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = ffi.from_buffer("uint8_t[]", mapped)
    lib.np_memory_advise_huge(memory, size_bytes)
    for offset in range(0, size_bytes, mmap.PAGESIZE):
        mapped[offset] = 1
    lib.np_reader_register(reader, memory, size_bytes)
    return memory


def io_uring_allowed(path: Path) -> bool:
    """Return True if this process can read `path` through io_uring, which app sandboxes forbid."""
    error = ffi.new("int *")
    reader = lib.np_reader_open(os.fsencode(path), b"io_uring", 1, error)
    if reader == ffi.NULL:
        return False
    lib.np_reader_close(reader)
    return True


def measure_curve(path: Path, *, brief: bool) -> FlashCurve | None:
    """Measure the read speeds of the file's storage; None if the file is too small.

    It takes BRIEF_BUDGET_S or FULL_BUDGET_S, and up to twice that if points are unsteady. Raises UserError if the file
    cannot be read.
    """
    points, budget_s = (BRIEF_POINTS, BRIEF_BUDGET_S) if brief else (FULL_POINTS, FULL_BUDGET_S)
    file_bytes = path.stat().st_size
    if file_bytes < MIN_FILE_BYTES:
        return None
    points = tuple((size, depth) for size, depth in points if MIN_PLACES * size <= file_bytes)
    reader = open_reader(path, max(depth for _, depth in points))
    try:
        memory = read_buffers(reader, max(size * depth for size, depth in points))
        round_s = budget_s / len(points) / ROUNDS
        rounds = repeat_points(points, lambda size, depth: _measure_point(reader, path, memory, size, depth, round_s))
        return FlashCurve(
            engine=ffi.string(lib.np_reader_engine(reader)).decode(),
            direct=bool(lib.np_reader_direct(reader)),
            points=tuple(
                FlashPoint(request_bytes=size, depth=depth, bytes_per_s=statistics.median(rounds[size, depth]))
                for size, depth in points
            ),
            spread=round(max(spread_of(speeds) for speeds in rounds.values()), 3),
        )
    finally:
        lib.np_reader_close(reader)


def repeat_points(
    points: Sequence[tuple[int, int]], measure_point: Callable[[int, int], float]
) -> dict[tuple[int, int], list[float]]:
    """Return the repetitions of every point (request_bytes, depth), in bytes per second.

    Points take turns, so that one disturbance affects few repetitions of each. Then points are repeated whose spread is
    large, and pairs of points where more bytes or a larger depth is slower.
    """
    rounds: dict[tuple[int, int], list[float]] = {point: [] for point in points}
    for turn in range(ROUNDS + MAX_MORE_ROUNDS):
        for point in points if turn < ROUNDS else _unsteady(rounds):
            rounds[point].append(measure_point(*point))
    return rounds


def _unsteady(rounds: Mapping[tuple[int, int], Sequence[float]]) -> list[tuple[int, int]]:
    speeds = {point: statistics.median(measured) for point, measured in rounds.items()}
    unsteady = {point for point, measured in rounds.items() if spread_of(measured) > NOISE}
    for small, large in itertools.permutations(speeds, 2):
        larger = small[0] <= large[0] and small[1] <= large[1]
        if larger and (small[0] == large[0] or small[1] == large[1]) and speeds[large] < (1 - NOISE) * speeds[small]:
            unsteady |= {small, large}
    return [point for point in rounds if point in unsteady]


def _measure_point(
    reader: Any,
    path: Path,
    memory: Any,
    read_bytes: int,
    depth: int,
    budget_s: float,
    *,
    range_bytes: int | None = None,
    sequential: bool = False,
) -> float:
    """Return the speed in bytes per second with `depth` reads in flight.

    Reads are at random positions within the first range_bytes of the file (None: the whole file), or sequential from a
    random position on, beginning again at the end of the range.
    """
    step = max(4096, lib.np_reader_alignment(reader))
    places = ((range_bytes or path.stat().st_size) - read_bytes) // step + 1
    next_offset = itertools.count(random.randrange(places) * step // read_bytes * read_bytes, read_bytes)
    targets = [ffi.cast("void *", memory + slot * read_bytes) for slot in range(depth)]
    done = ffi.new("np_completion[]", depth)

    def submit(slots: list[int]) -> None:
        if sequential:
            offsets = [next(next_offset) % (places * step) // step * step for _ in slots]
        else:
            offsets = [random.randrange(places) * step for _ in slots]
        addresses = [targets[slot] for slot in slots]
        submitted = lib.np_reader_submit(reader, offsets, [read_bytes] * len(slots), addresses, slots, len(slots))
        if submitted != len(slots):
            raise UserError(f"{path}: the reader accepted {submitted} of {len(slots)} reads; run `neuronpipe doctor`")

    reads = 0
    started = now = time.perf_counter()
    submit(list(range(depth)))
    in_flight = depth
    while in_flight:
        count = lib.np_reader_reap(reader, done, 1, depth, -1)
        for completion in done[0:count]:
            if completion.result != read_bytes:
                reason = os.strerror(-completion.result) if completion.result < 0 else "the file ends early"
                raise UserError(f"{path}: reading failed ({reason}); check the storage or convert the model again")
        now = time.perf_counter()
        reads += count
        in_flight -= count
        if now - started < budget_s:
            submit([completion.tag for completion in done[0:count]])
            in_flight += count
    return reads * read_bytes / (now - started)
