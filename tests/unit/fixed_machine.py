"""A fixed device: a PC with two cores whose loader shares them, and figures that were measured on such a machine."""

from __future__ import annotations

import dataclasses
from typing import Any

from neuronpipe.plans.device import measured_points as points
from neuronpipe.plans.device.cores import Core
from neuronpipe.plans.device.device import Device, FlashCurve, FlashPoint
from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.device.profile import VERSION, DeviceProfile, FlashProfile

GIB = 1 << 30
WORKERS = (1, 2)
ROW: dict[str, Any] = {"quantization": "q4", "row_weights": 2048, "core": None}
# GB/s of one and of two workers, by kernel and share of the neurons.
KERNELS: dict[tuple[points.DecodeKind, float], tuple[float, float]] = {
    ("matrix", 1.0): (13.3, 23.1),
    ("triggers", 1.0): (12.3, 23.3),
    ("ups", 0.1): (5.5, 10.7),
    ("ups", 0.5): (7.2, 13.4),
    ("downs", 0.1): (9.7, 18.7),
    ("downs", 0.5): (16.5, 33.2),
    ("predicted_triggers", 0.1): (6.3, 12.8),
    ("predicted_triggers", 0.5): (9.0, 17.0),
    ("predicted_ups", 0.1): (5.7, 11.4),
    ("predicted_ups", 0.5): (7.4, 13.8),
    ("predicted_downs", 0.1): (8.9, 17.8),
    ("predicted_downs", 0.5): (16.5, 32.4),
}
PANELS = {
    8: (40.0, 80.0),
    16: (68.0, 134.5),
    64: (130.4, 260.7),
    512: (169.0, 335.4),
}  # 10^9 token weights per second, by tokens
REUSED = {"ups": (72.0, 147.0), "downs": (46.0, 96.0)}  # likewise, by kind
# MB/s by reads at once, of 4, 16, 64 and 256 KiB.
FLASH = {1: (59, 224, 543, 1055), 8: (205, 529, 984, 1165), 32: (292, 703, 1094, 1165), 128: (403, 746, 1094, 1165)}
# Processor time of a read in microseconds, by reads at once, of 4, 16 and 64 KiB.
READ_US = {1: (33.0, 35.8, 44.3), 8: (7.1, 9.8, 20.3), 64: (4.4, 6.0, 17.7)}


def machine(scale: float = 1.0, flash_scale: float = 1.0) -> Device:
    """Return the machine.

    scale: factor of the speeds of its cores and memory
    flash_scale: factor of the speed of its flash
    """
    cores = tuple(Core(id=n, capacity=1024, kind="big") for n in range(2))
    curve = FlashCurve(
        engine="io_uring",
        direct=True,
        points=tuple(
            FlashPoint(request_bytes=4096 * 4**n, depth=depth, bytes_per_s=1e6 * speed * flash_scale)
            for depth, speeds in FLASH.items()
            for n, speed in enumerate(speeds)
        ),
    )
    device = Device(
        architecture="x86_64",
        instruction_set="avx512",
        cores=cores,
        cpu_quota=None,
        memory_total_bytes=64 * GIB,
        memory_available_bytes=64 * GIB,
        page_bytes=4096,
        memlock_bytes=None,
        io_uring=True,
        flash=curve,
    )
    measured = _profile(device, scale, flash_scale)
    return dataclasses.replace(device, profile=measured, memory_speed=measured.memory_speed())


def _figure(value: float) -> Figure:
    return Figure(median=value, spread=0.0)


def _profile(device: Device, scale: float, flash_scale: float) -> DeviceProfile:
    def speed(of_workers: tuple[float, float], workers: int) -> Figure:
        return _figure(1e9 * scale * of_workers[workers - 1])

    return DeviceProfile(
        version=VERSION,
        device_id=device.id,
        architecture=device.architecture,
        instruction_set=device.instruction_set,
        taken_at=1.0,
        busy=0.0,
        cores=(points.CoreClass(kind="big", cores=(0, 1), capacity=1024, measured=0),),
        decode_workers=2,
        arena_bytes=GIB,
        cache_bytes=32 << 20,
        dram=tuple(
            points.DramPoint(workers=workers, piece_bytes=size, bytes_per_s=speed(of_workers, workers))
            for size, of_workers in ((1024, (9.4, 16.9)), (4096, (15.8, 26.3)), (1 << 20, (17.5, 31.0)))
            for workers in WORKERS
        ),
        decode=tuple(
            points.DecodePoint(**ROW, kind=kind, share=share, workers=workers, bytes_per_s=speed(of_workers, workers))
            for (kind, share), of_workers in KERNELS.items()
            for workers in WORKERS
        ),
        panels=tuple(
            points.PanelPoint(**ROW, tokens=tokens, workers=workers, token_weights_per_s=speed(of_workers, workers))
            for tokens, of_workers in PANELS.items()
            for workers in WORKERS
        ),
        reused=tuple(
            points.ReusedPoint(
                **ROW, kind=kind, share=share, workers=workers, token_weights_per_s=speed(of_workers, workers)
            )
            for kind, of_workers in REUSED.items()
            for share in (0.1, 0.5)
            for workers in WORKERS
        ),
        flash=FlashProfile(
            engine="io_uring",
            direct=True,
            file_bytes=GIB,
            reads=tuple(
                points.FlashRead(
                    request_bytes=point.request_bytes,
                    depth=point.depth,
                    range_bytes=GIB,
                    sequential=False,
                    core=None,
                    bytes_per_s=_figure(point.bytes_per_s),
                )
                for point in (device.flash.points if device.flash else ())
            ),
            costs=tuple(
                points.ReadCost(request_bytes=4096 * 4**n, at_once=at_once, cpu_us=_figure(us / scale))
                for at_once, of_sizes in READ_US.items()
                for n, us in enumerate(of_sizes)
            ),
        ),
        sharing=(),
        barriers=tuple(points.Wait(workers=workers, us=_figure(0.5)) for workers in WORKERS),
        messages=tuple(points.Wait(workers=workers, us=_figure(240.0)) for workers in WORKERS),
        steps=tuple(
            points.StepPoint(
                mode=mode, workers=2, kernels_us=_figure(7500.0), step_us=_figure(step_us), between_us=_figure(300.0)
            )
            for mode, step_us in (("exact", 9300.0), ("predicted", 9000.0))
        ),
        read_delays=(
            points.ReadDelay(together=True, workers=2, us=_figure(809.0)),
            points.ReadDelay(together=False, workers=2, us=_figure(61.0)),
        ),
        read_factors=(points.ReadFactor(workers=2, factor=_figure(3.9)),),
    )
