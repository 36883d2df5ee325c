"""Converts a device file to the planner's `Device`, with published and assumed values instead of measurements.

Only the cores compute, since no backend drives a phone's NPU. No machine runs such a plan, because none has the
device id of the description.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from neuronpipe.plans.device import measured_points as points
from neuronpipe.plans.device.cores import FULL_CAPACITY, Core, Kind, assign_cores, max_decode_workers
from neuronpipe.plans.device.device import DESCRIBED, Device, FlashCurve, FlashPoint
from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.device.profile import LIMITS, VERSION, DeviceProfile
from neuronpipe.plans.lab.devices.device_file import LOADER_DEPTH, CoreClass, DeviceModel
from neuronpipe.plans.lab.shapes.models import BITS_PER_WEIGHT
from neuronpipe.plans.package.layout import PAGE_BYTES, Quantization
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import KV_TYPES

READ_BYTES = tuple(PAGE_BYTES << n for n in range(9))  # 4 KiB to 1 MiB
PIECE_BYTES = 1024  # the device file has no speeds of smaller pieces of memory
ENGINE = "threads"  # an app's sandbox forbids io_uring
# Speed of multiplying weights, relative to weights of four bits: an f16 lane is as wide as two lanes of bytes.
MULTIPLIED: dict[Quantization, float] = {"q4": 1.0, "q4k": 1.0, "q8": 1.0, "f16": 0.5}
NO_DATE = 1.0  # a profile needs a date, which a description does not have


def planner_device(model: DeviceModel, manifest: Manifest) -> Device:
    """Return the device for the planner. Flash has the speed of reads that are spread over a layer of the package."""
    classes = _by_number(model)
    fastest = max(core.computes_gb_per_s for core in classes)
    cores = tuple(
        Core(id=n, capacity=max(1, round(FULL_CAPACITY * core.computes_gb_per_s / fastest)), kind=core.kind)
        for n, core in enumerate(classes)
    )
    memory_bytes = int(model.memory_usable_gb.value * 1e9)
    curve = _flash(model, cores, manifest)
    device = Device(
        architecture=DESCRIBED,
        instruction_set=model.name,
        cores=cores,
        cpu_quota=None,
        memory_total_bytes=memory_bytes,
        memory_available_bytes=memory_bytes,
        page_bytes=PAGE_BYTES,
        memlock_bytes=None,
        io_uring=False,
        flash=curve,
    )
    profile = _profile(model, device, classes)
    return dataclasses.replace(device, profile=profile, memory_speed=profile.memory_speed())


def caveats(model: DeviceModel) -> tuple[str, ...]:
    sources = [source for _, _, source in model.sources()]
    assumed = sum("assumed" in source or "fitted" in source for source in sources)
    notes = (
        f"for {model.name}, as its file describes it: of {len(sources)} values {assumed} are assumed, wholly or in "
        "part, and none was measured here; flash is read by threads, since an app's sandbox forbids io_uring",
    )
    npu = "for its cores alone: no backend here drives its NPU, which would compute prompts many times as fast"
    return (*notes, npu) if model.has_npu else notes


def _by_number(model: DeviceModel) -> list[CoreClass]:
    """Return the class of each core, by the core's number. Phones number their cores from the slowest on."""
    order: tuple[Kind, ...] = ("little", "mid", "big")
    classes = sorted(model.cores, key=lambda core: (order.index(core.kind), core.computes_gb_per_s))
    return [core for core in classes for _ in range(core.count)]


def _flash(model: DeviceModel, cores: Sequence[Core], manifest: Manifest) -> FlashCurve:
    loader = assign_cores(cores, 1)["loader"]
    kind = next(core.kind for core in cores if core.id == loader)
    spec = manifest.model
    layer_bytes = manifest.layout.cluster_stride_bytes * manifest.layout.clusters * spec.experts_per_token
    points = tuple(
        FlashPoint(
            request_bytes=size, depth=LOADER_DEPTH, bytes_per_s=model.random_bytes_per_s(size, layer_bytes, kind)
        )
        for size in READ_BYTES
    )
    return FlashCurve(engine=ENGINE, direct=True, points=points)


def _profile(model: DeviceModel, device: Device, classes: Sequence[CoreClass]) -> DeviceProfile:
    """Return a device profile with memory speeds, kernel speeds and waiting times for every number of workers.

    It has no speeds of decode kernels. Memory speeds are limited to the bytes that the cores can compute instead.
    """
    max_workers = max_decode_workers(device.cores)
    teams = {count: _team(device, classes, count) for count in range(1, max_workers + 1)}
    read = {count: _reads_bytes_per_s(model, team) for count, team in teams.items()}
    computed = {count: sum(core.computes_gb_per_s for core in team) * 1e9 for count, team in teams.items()}
    fast = [core for core in device.cores if core.capacity == FULL_CAPACITY]
    return DeviceProfile(
        version=VERSION,
        device_id=device.id,
        architecture=device.architecture,
        instruction_set=device.instruction_set,
        taken_at=NO_DATE,
        busy=0.0,
        cores=(
            points.CoreClass(
                kind=fast[0].kind,
                cores=tuple(core.id for core in fast),
                capacity=FULL_CAPACITY,
                measured=fast[0].id,
            ),
        ),
        decode_workers=max_workers,
        arena_bytes=0,
        cache_bytes=0,
        dram=tuple(
            points.DramPoint(workers=count, piece_bytes=size, bytes_per_s=_figure(min(read[count], computed[count])))
            for count in teams
            for size in (PIECE_BYTES, points.SEQUENTIAL_PIECE_BYTES)
        ),
        decode=(),
        panels=tuple(_panels(computed)),
        reused=tuple(_reused(computed)),
        flash=None,
        sharing=(),
        barriers=_waits(teams, model.barrier_us.value),
        messages=_waits(teams, model.message_us.value),
        steps=(),
        read_delays=(),
        read_factors=(),
    )


def _team(device: Device, classes: Sequence[CoreClass], workers: int) -> list[CoreClass]:
    places = assign_cores(device.cores, workers)
    numbers = [places[f"decode.{n}"] for n in range(workers)]
    return [classes[number] for number in numbers if number is not None]


def _reads_bytes_per_s(model: DeviceModel, team: Sequence[CoreClass]) -> float:
    return 1e9 * min(model.dram_cpu_gb_per_s.value, sum(core.reads_gb_per_s for core in team))


def _panels(computed: dict[int, float]) -> Iterator[points.PanelPoint]:
    for quantization, width, workers, speed in _multiplied(computed):
        yield points.PanelPoint(
            quantization=quantization,
            row_weights=width,
            tokens=1,
            workers=workers,
            core=None,
            token_weights_per_s=_figure(speed),
        )


def _reused(computed: dict[int, float]) -> Iterator[points.ReusedPoint]:
    kinds: tuple[points.ReusedKind, ...] = ("ups", "downs")
    for quantization, width, workers, speed in _multiplied(computed):
        place: dict[str, Any] = {"row_weights": width, "share": 1.0, "workers": workers, "core": None}
        for kind in kinds:
            yield points.ReusedPoint(kind=kind, quantization=quantization, token_weights_per_s=_figure(speed), **place)
        # Attention multiplies f16 and q8 alike, as floats.
        for kv_type in KV_TYPES if quantization == "f16" else ():
            yield points.ReusedPoint(kind="attended", quantization=kv_type, token_weights_per_s=_figure(speed), **place)


def _multiplied(computed: dict[int, float]) -> Iterator[tuple[Quantization, int, int, float]]:
    """Yield (quantization, weights of a row, workers, products of weight and token per second)."""
    for quantization, times in MULTIPLIED.items():
        for workers, bytes_per_s in computed.items():
            yield quantization, 4096, workers, times * bytes_per_s * 8 / BITS_PER_WEIGHT


def _waits(teams: dict[int, list[CoreClass]], us: float) -> tuple[points.Wait, ...]:
    return tuple(points.Wait(workers=count, us=_figure(us, "us")) for count in teams)


def _figure(value: float, unit: str = "per_s") -> Figure:
    """Return a figure clamped to the limits of a profile, which are narrower than those of a device file."""
    minimum, maximum = LIMITS[unit]
    return Figure(median=min(maximum, max(minimum, value)), spread=0.0)
