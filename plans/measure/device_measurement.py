"""Measurement of a device profile in well under a minute: memory, kernels, waits, flash, cost of reads."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from neuronpipe.plans.device.cores import Kind, physical_cores
from neuronpipe.plans.device.measured_points import DecodePoint, PanelPoint, ReusedPoint, Sharing
from neuronpipe.plans.device.profile import VERSION, DeviceProfile, FlashProfile
from neuronpipe.plans.measure.barrier_waits import measure_barriers, measure_messages
from neuronpipe.plans.measure.benchmark_slots import BenchmarkMemory, allocate_benchmark_memory, largest_cache_bytes
from neuronpipe.plans.measure.brief_measurement import core_classes
from neuronpipe.plans.measure.flash_reads import MIN_FILE_BYTES, ReadCase, measure_reads, read_cases
from neuronpipe.plans.measure.kernel_speed import Case, Point, all_cases, measure_kernels, profile_cases
from neuronpipe.plans.measure.machine_load import MachineLoad
from neuronpipe.plans.measure.memory_bandwidth import PROFILE_PIECES, measure_dram
from neuronpipe.plans.measure.probe import decode_cores, this_device
from neuronpipe.plans.measure.read_cost import COST_CASES, measure_costs, measure_sharing
from neuronpipe.plans.package.manifest import BUNDLES
from neuronpipe.plans.package.reader import Package, neurons_file
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

ROUNDS = 5
FLASH_ROUNDS = 3
DRAM_REPETITION_S = 0.02
KERNEL_REPETITION_S = 0.015
FLASH_REPETITION_S = 0.03
SHARING_REPETITION_S = 0.08


@frozen
class Effort:
    """Amount of measuring: everything by default, a little of each in tests.

    pace: relative duration of a repetition
    """

    rounds: int = ROUNDS
    flash_rounds: int = FLASH_ROUNDS
    pace: float = 1.0
    kernels: tuple[Case, ...] = all_cases()


def measure_profile(
    directory: Path, *, effort: Effort | None = None, progress: Callable[[int, int], None] = lambda done, total: None
) -> DeviceProfile:
    """Measure the profile of this device, and of the flash that the package in `directory` lies on.

    Flash is omitted if there is no package or a small one. Steps, read delays and read factors, which need a run, are
    empty. Raises UserError if flash cannot be read.

    progress: receives the numbers of measurements done and of all, also repeatedly during a long measurement
    """
    return _Measurement(directory, effort or _whole_effort(directory), progress).profile()


def _whole_effort(directory: Path) -> Effort:
    """Return the effort of a profile for the package in `directory`, if there is one."""
    try:
        return Effort(kernels=profile_cases(Package.open(directory).manifest))
    except UserError:
        return Effort()


def measure_flash(
    profile: DeviceProfile,
    directory: Path,
    *,
    effort: Effort | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DeviceProfile:
    """Return the profile with flash measured again. Raises UserError if the package is too small or unreadable."""
    return _Measurement(directory, effort or Effort(), progress).with_flash(profile)


class _Measurement:
    def __init__(self, directory: Path, effort: Effort, progress: Callable[[int, int], None]) -> None:
        self._device = this_device()
        self._file = neurons_file(directory) or directory / BUNDLES
        self._effort, self._progress = effort, progress
        self._classes = core_classes(self._device)
        self._cores = decode_cores(self._device)
        has_flash = self._file.is_file() and self._file.stat().st_size >= MIN_FILE_BYTES
        self._reads: tuple[ReadCase, ...] = read_cases(self._file.stat().st_size, self._classes) if has_flash else ()
        self._done = 0
        self._total = self._count()

    def _count(self) -> int:
        rounds, workers = self._effort.rounds, len(self._cores)
        process_groups = len(self._classes) + len(self._worker_groups())
        steps = rounds * (workers * len(PROFILE_PIECES) + process_groups * len(self._effort.kernels) + 2 * workers)
        flash = self._effort.flash_rounds * len(self._reads) + rounds * (len(COST_CASES) + 2)
        return steps + (flash if self._reads else 0)

    def _step(self, count: int) -> None:
        self._done = min(self._done + count, self._total)
        self._progress(self._done, self._total)

    def profile(self) -> DeviceProfile:
        device, effort, load = self._device, self._effort, MachineLoad()
        taken_at = time.time()
        self._step(0)  # show progress before the first measurement, which is long
        cache_bytes = largest_cache_bytes(Path("/"))
        rounds = effort.rounds
        dram = measure_dram(
            self._cores,
            device.memory_available_bytes,
            rounds=rounds,
            budget_s=effort.pace * DRAM_REPETITION_S,
            progress=self._step,
        )
        memory = allocate_benchmark_memory(device.memory_available_bytes, cache_bytes, len(self._cores))
        points = self._kernels(memory) if memory else []
        barriers = measure_barriers(self._cores, rounds=rounds, progress=self._step)
        messages = measure_messages(self._cores, rounds=rounds, progress=self._step)
        flash = self._flash() if self._reads else None
        sharing = self._sharing(memory) if memory and self._reads else ()
        self._progress(self._total, self._total)
        return DeviceProfile(
            version=VERSION,
            device_id=device.id,
            architecture=device.architecture,
            instruction_set=device.instruction_set,
            taken_at=round(taken_at, 1),
            busy=round(max(load.processor_share(), load.storage_share()), 3),
            cores=self._classes,
            decode_workers=len(self._cores),
            arena_bytes=len(memory.content) if memory else 0,
            cache_bytes=cache_bytes,
            dram=dram,
            decode=tuple(point for point in points if isinstance(point, DecodePoint)),
            panels=tuple(point for point in points if isinstance(point, PanelPoint)),
            reused=tuple(point for point in points if isinstance(point, ReusedPoint)),
            flash=flash,
            sharing=sharing,
            barriers=barriers,
            messages=messages,
            steps=(),
            read_delays=(),
            read_factors=(),
        )

    def with_flash(self, profile: DeviceProfile) -> DeviceProfile:
        if not self._reads:
            raise UserError(f"{self._file}: too small to measure flash with; name a larger package")
        self._total = self._effort.flash_rounds * len(self._reads) + self._effort.rounds * len(COST_CASES)
        load = MachineLoad()
        self._step(0)
        flash = self._flash()
        self._progress(self._total, self._total)
        busy = round(max(load.processor_share(), load.storage_share()), 3)
        return dataclasses.replace(profile, flash=flash, busy=max(profile.busy, busy))

    def _worker_groups(self) -> list[Sequence[int | None]]:
        """Return the cores of all workers, and where siblings share cores (SMT) those of one worker for each."""
        counts = sorted({physical_cores(self._device.cores), len(self._cores)})
        return [self._cores[:count] for count in counts if 1 < count <= len(self._cores)]

    def _kernels(self, memory: BenchmarkMemory) -> list[Point]:
        process_groups: list[tuple[Sequence[int | None], Kind | None]] = [
            ([core_class.measured], core_class.kind) for core_class in self._classes
        ]
        process_groups += [(cores, None) for cores in self._worker_groups()]
        points: list[Point] = []
        for cores, kind in process_groups:
            points += measure_kernels(
                memory,
                cores,
                kind,
                self._effort.kernels,
                rounds=self._effort.rounds,
                budget_s=self._effort.pace * KERNEL_REPETITION_S,
                progress=self._step,
            )
        return points

    def _flash(self) -> FlashProfile:
        effort = self._effort
        engine, direct, reads = measure_reads(
            self._file,
            self._reads,
            rounds=effort.flash_rounds,
            budget_s=effort.pace * FLASH_REPETITION_S,
            progress=self._step,
        )
        costs = measure_costs(self._file, self._classes[0].measured, rounds=effort.rounds, progress=self._step)
        return FlashProfile(
            engine=engine, direct=direct, file_bytes=self._file.stat().st_size, reads=reads, costs=costs
        )

    def _sharing(self, memory: BenchmarkMemory) -> tuple[Sharing, ...]:
        core = self._classes[0].measured
        other_cores = [candidate.id for candidate in self._device.cores if candidate.allowed and candidate.id != core]
        return measure_sharing(
            self._file,
            memory,
            core,
            other_cores,
            rounds=self._effort.rounds,
            budget_s=self._effort.pace * SHARING_REPETITION_S,
            progress=self._step,
        )
