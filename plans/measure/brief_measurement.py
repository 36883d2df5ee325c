"""Measurement at a start: memory, and the decode and prefill kernels that one package needs, in about a second.

This is a small part of the device profile, measured in the same way. Processes are pinned to cores, and the median call
counts, so that other programs distort little. The speed of memory alone does not predict that of kernels: scattered
rows are read twice as fast as kernels compute them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from neuronpipe.plans.device.cores import FULL_CAPACITY, Kind
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.device.measured_points import CoreClass, DecodePoint, PanelPoint, ReusedPoint
from neuronpipe.plans.device.profile import VERSION, DeviceProfile
from neuronpipe.plans.measure.barrier_waits import measure_barriers, measure_messages
from neuronpipe.plans.measure.benchmark_slots import (
    MIN_BYTES,
    WORKER_BYTES,
    BenchmarkMemory,
    allocate_benchmark_memory,
    largest_cache_bytes,
)
from neuronpipe.plans.measure.kernel_speed import Case, Point, measure_kernels
from neuronpipe.plans.measure.machine_load import MachineLoad
from neuronpipe.plans.measure.memory_bandwidth import measure_dram

KINDS: tuple[Kind, ...] = ("big", "mid", "little")
BRIEF_MEMORY_BYTES = 128 << 20
BRIEF_ROUNDS, BRIEF_REPETITION_S = 3, 0.006
FULL_ROUNDS, FULL_REPETITION_S = 5, 0.02


def core_classes(device: Device) -> tuple[CoreClass, ...]:
    """Return the classes of the cores that this process may use, big ones first.

    The core to measure of a class is its fastest.
    """
    classes = []
    for kind in KINDS:
        cores = [core for core in device.cores if core.kind == kind and core.allowed]
        if cores:
            fastest = max(cores, key=lambda core: (core.capacity, -core.id))
            ids = tuple(core.id for core in cores)
            classes.append(
                CoreClass(kind=kind, cores=ids, capacity=min(fastest.capacity, FULL_CAPACITY), measured=fastest.id)
            )
    return tuple(classes)


def measure_briefly(
    device: Device, cores: Sequence[int | None], cases: Sequence[Case], *, brief: bool
) -> DeviceProfile | None:
    """Measure a device profile with only memory, these kernels, barriers and messages.

    None if too little memory is available to measure on.

    cores: the core of each worker (None: not pinned)
    """
    rounds, repetition_s = (BRIEF_ROUNDS, BRIEF_REPETITION_S) if brief else (FULL_ROUNDS, FULL_REPETITION_S)
    available_bytes, load, taken_at = device.memory_available_bytes, MachineLoad(), time.time()
    dram = measure_dram(
        cores,
        available_bytes,
        rounds=rounds,
        budget_s=repetition_s,
        max_bytes=BRIEF_MEMORY_BYTES,
        counts=sorted({1, len(cores)}),
    )
    if not dram:
        return None
    usual_bytes = max(BRIEF_MEMORY_BYTES, -(-len(cores) * WORKER_BYTES // MIN_BYTES) * MIN_BYTES)
    memory = allocate_benchmark_memory(available_bytes, 0, len(cores), usual_bytes=usual_bytes) if cases else None
    classes = core_classes(device)
    points = tuple(_kernels(memory, cores, classes[0], cases, rounds, repetition_s)) if memory else ()
    return DeviceProfile(
        version=VERSION,
        device_id=device.id,
        architecture=device.architecture,
        instruction_set=device.instruction_set,
        taken_at=round(taken_at, 1),
        cores=classes,
        decode_workers=len(cores),
        arena_bytes=len(memory.content) if memory else 0,
        cache_bytes=largest_cache_bytes(Path("/")),
        dram=dram,
        decode=tuple(point for point in points if isinstance(point, DecodePoint)),
        panels=tuple(point for point in points if isinstance(point, PanelPoint)),
        reused=tuple(point for point in points if isinstance(point, ReusedPoint)),
        flash=None,
        sharing=(),
        barriers=measure_barriers(cores, rounds=1),
        messages=measure_messages(cores, rounds=1),
        steps=(),
        read_delays=(),
        read_factors=(),
        busy=round(load.processor_share(), 3),
    )


def _kernels(
    memory: BenchmarkMemory,
    cores: Sequence[int | None],
    fastest: CoreClass,
    cases: Sequence[Case],
    rounds: int,
    repetition_s: float,
) -> Iterator[Point]:
    """Yield the points of one worker and of all workers, since a search may choose fewer."""
    yield from measure_kernels(memory, [fastest.measured], fastest.kind, cases, rounds=rounds, budget_s=repetition_s)
    if len(cores) > 1:
        yield from measure_kernels(memory, cores, None, cases, rounds=rounds, budget_s=repetition_s)
