"""Measurement of the processor time of a flash read, and of a loader and a worker that run at the same time.

The native loader of a run submits reads, reaps them, verifies checksums, copies into slots and publishes, in a process
of its own. The processor time of this process is counted, including that in the kernel.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.device.measured_points import MAX_SHARE, ReadCost, Sharing
from neuronpipe.plans.measure.benchmark_processes import BenchmarkProcess, OnMeasured, ignore_progress, measure_together
from neuronpipe.plans.measure.benchmark_slots import BenchmarkMemory, Neurons
from neuronpipe.plans.measure.flash_reads import open_reader
from neuronpipe.protocol.errors import UserError

SIZES_BYTES = (4096, 16384, 65536)
AT_ONCE = (1, 8, 64)
COST_CASES = [(size, at_once) for size in SIZES_BYTES for at_once in AT_ONCE]
SHARING_SIZE_BYTES = 8192  # size of a 7B model's cluster at q4
DEPTH = 32
PAGE_BYTES = 4096
MAX_BYTES = 32 << 20  # of the file, for each size
MAX_CLUSTERS = 2048
MIN_CLUSTERS = 64  # sizes of which the file has fewer are not measured
TURN_MS = 1000


class _LoaderBenchmark:
    """The native loader with clusters of `size_bytes` at the start of a file.

    An unused page follows each cluster, so that no two clusters are read together.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path, self._stride_bytes = path, size_bytes + PAGE_BYTES
        self.size_bytes = size_bytes
        self.clusters = _clusters(path.stat().st_size, size_bytes)
        self._reader = open_reader(path, DEPTH)
        self._words = [array("I", bytes(4 * self.clusters)) for _ in range(2)]
        self._slots = mmap.mmap(-1, self.clusters * self._stride_bytes)
        self._checksums = array("I", [0]) * self.clusters
        self._order = random.Random(size_bytes).sample(range(self.clusters), self.clusters)
        with path.open("rb", buffering=0) as file:
            for cluster in range(self.clusters):
                data = os.pread(file.fileno(), size_bytes, cluster * self._stride_bytes)
                self._checksums[cluster] = lib.np_crc32c(0, data, len(data))
        self._keep: list[Any] = []
        self._loader = self._create()
        if self._loader == ffi.NULL:
            raise UserError(f"{path}: the loader cannot read it in pieces of {size_bytes} bytes")

    def _create(self) -> Any:
        slots = ffi.cast("uint8_t *", ffi.from_buffer(self._slots))
        parts = []
        for part, (offset, bytes_, start) in enumerate(
            ((0, self.size_bytes, 0), (self.size_bytes, PAGE_BYTES, self.clusters * self.size_bytes))
        ):
            words, checksums = (
                ffi.from_buffer("uint32_t[]", self._words[part]),
                ffi.from_buffer("uint32_t[]", self._checksums),
            )
            self._keep += [words, checksums]
            parts.append(
                {
                    "base_offset": 0,
                    "stride_bytes": self._stride_bytes,
                    "part_offset": offset,
                    "part_bytes": bytes_,
                    "slot_bytes": bytes_,
                    "slot_count": self.clusters,
                    "demand_slots": 0,
                    "slots": slots + start,
                    "slots_file": -1,
                    "slots_file_offset": 0,
                    "words": words,
                    "cluster_count": self.clusters,
                    "checksums": checksums,
                    "checksum_stride": 1,
                }
            )
        reading = {
            "most_read_bytes": max(self.size_bytes, PAGE_BYTES),
            "merge_gap_bytes": 0,
            "prefetch_depth": 0,
            "warm_up_reads": 0,
            "warm_up_read_bytes": max(self.size_bytes, PAGE_BYTES),
        }
        arrivals = ffi.new("uint32_t *")
        native = ffi.new("np_loader_part[2]", parts), ffi.new("np_loader_reading *", reading)
        self._keep += [arrivals, *native]
        return lib.np_loader_create(self._reader, *native, arrivals, self.clusters)

    def read_all(self, at_once: int | None = None) -> None:
        """Read every cluster once, in random order. Raises UserError if a read takes too long.

        at_once: number of clusters requested together (default: all)
        """
        for words in self._words:
            words[:] = array("I", bytes(4 * self.clusters))
        lib.np_loader_reset(self._loader)
        lib.np_loader_grant(self._loader, lib.NP_TRIGGER, list(range(self.clusters)), self.clusters)
        step = at_once or self.clusters
        for first in range(0, self.clusters, step):
            self._read(self._order[first : first + step])

    def _read(self, clusters: Sequence[int]) -> None:
        lib.np_loader_request(self._loader, lib.NP_REQUEST_TRIGGER, clusters, len(clusters), 0, 0)
        published = 0
        while published < len(clusters):
            arrived = lib.np_loader_turn(self._loader, TURN_MS)
            if arrived == 0:
                raise UserError(f"{self._path}: a read took longer than {TURN_MS} ms; run `neuronpipe doctor`")
            published += arrived

    def close(self) -> None:
        lib.np_loader_destroy(self._loader)
        lib.np_reader_close(self._reader)


def _clusters(file_bytes: int, size_bytes: int) -> int:
    return min(MAX_CLUSTERS, min(file_bytes, MAX_BYTES) // (size_bytes + PAGE_BYTES))


def measure_costs(
    path: Path, core: int | None, *, rounds: int, progress: OnMeasured = ignore_progress
) -> tuple[ReadCost, ...]:
    """Measure the processor time of a read, by size and by number of reads requested together, on `core`.

    Sizes that the file has less than MIN_CLUSTERS times are omitted.
    """
    sizes = [size for size in SIZES_BYTES if _clusters(path.stat().st_size, size) >= MIN_CLUSTERS]
    cases = [(size, at_once) for size, at_once in COST_CASES if size in sizes]

    def work(process: BenchmarkProcess) -> Iterator[Sequence[float]]:
        assert process.count == 1
        loaders = {size: _LoaderBenchmark(path, size) for size in sizes}
        for loader in loaders.values():
            loader.read_all()  # the first touch of the slots
        for _ in range(rounds):
            for size, at_once in cases:
                began = time.process_time()
                loaders[size].read_all(at_once)
                yield [1e6 * (time.process_time() - began) / loaders[size].clusters]

    repetitions_us: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    turns = (case for _ in range(rounds) for case in cases)
    for case, [[cpu_us]] in zip(turns, measure_together([core], work, progress), strict=True):
        repetitions_us[case].append(max(1e-3, cpu_us))
    return tuple(
        ReadCost(request_bytes=size, at_once=at_once, cpu_us=Figure.of(values_us))
        for (size, at_once), values_us in repetitions_us.items()
    )


def measure_sharing(
    path: Path,
    memory: BenchmarkMemory,
    core: int,
    other_cores: Sequence[int],
    *,
    rounds: int,
    budget_s: float,
    progress: OnMeasured = ignore_progress,
) -> tuple[Sharing, ...]:
    """Measure how a worker on `core` and the loader slow each other down: on the same core, and on two cores.

    () if the file is too small.

    memory: weights for the worker
    other_cores: the loader runs on the first of these; if empty, there is no figure for two cores
    """
    if _clusters(path.stat().st_size, SHARING_SIZE_BYTES) < MIN_CLUSTERS:
        return ()
    sharings = []
    for loader_core in (core, *other_cores[:1]):
        shares: list[tuple[float, float]] = []
        for worker, loader in measure_together([core, loader_core], _pair(path, memory, rounds, budget_s), progress):
            shares.append((min(MAX_SHARE, worker[1] / worker[0]), min(MAX_SHARE, loader[1] / loader[0])))
        worker_share, loader_share = (Figure.of(repetitions) for repetitions in zip(*shares, strict=True))
        sharings.append(Sharing(same_core=loader_core == core, worker_share=worker_share, loader_share=loader_share))
    return tuple(sharings)


def _pair(
    path: Path, memory: BenchmarkMemory, rounds: int, budget_s: float
) -> Callable[[BenchmarkProcess], Iterator[Sequence[float]]]:
    """Return the work of process 0, which computes, and process 1, which reads: each alone, then both together.

    Each process yields its rates, (alone, together), in steps per second.
    """

    def work(process: BenchmarkProcess) -> Iterator[Sequence[float]]:
        reads = process.index == 1
        loader = _LoaderBenchmark(path, SHARING_SIZE_BYTES) if reads else None
        step = loader.read_all if loader is not None else _compute_step(memory)
        step()
        for _ in range(rounds):
            rates = [0.0, 0.0]
            for active in (0, 1, None):
                process.meet()
                if active in (process.index, None):
                    rates[active is None] = _rate(step, budget_s)
                elif active is not None:
                    time.sleep(budget_s)
            yield rates

    return work


def _compute_step(memory: BenchmarkMemory) -> Callable[[], None]:
    """Return a function that computes the triggers of a block of a 7B model, the next block with each call."""
    start = int(ffi.cast("uintptr_t", memory.pointer))
    neurons = Neurons("q4", 4096, start, len(memory.content))
    blocks = [neurons.rows(0, neurons.whole_block(block)) for block in range(neurons.blocks)]
    vector = ffi.from_buffer("uint8_t[]", mmap.mmap(-1, lib.np_activation_bytes(neurons.type, 4096)))
    lib.np_activation_prepare(neurons.type, ffi.new("float[]", [1.0] * 4096), 4096, vector)
    out, turn = ffi.new("float[]", neurons.block_neurons), [0]

    def step() -> None:
        rows = blocks[turn[0] % len(blocks)]
        turn[0] += 1
        lib.np_dot_scattered(neurons.type, rows.quants, rows.scales, rows.count, 4096, rows.fetch, vector, 0, 1, out, 0)

    return step


def _rate(step: Callable[[], None], budget_s: float) -> float:
    steps, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < budget_s or steps == 0:
        step()
        steps += 1
    return steps / took
