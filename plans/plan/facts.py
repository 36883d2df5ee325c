"""From a device profile to what the planner needs of it: seats with cores, memory, flash."""

from __future__ import annotations

from neuronpipe.plans.device.cores import assign_cores, default_decode_workers
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.plan.plan import GATEWAY, Seat
from neuronpipe.plans.plan.planner import DeviceFacts

MEMORY_SHARE = 0.7  # of what is available now, when the user names no limit


def device_facts(device: Device, workers: int | None = None, *, gateway: bool = False) -> DeviceFacts:
    """Seat `workers` decode workers (default: one per fast core) and the other roles; a gateway when asked for."""
    count = workers or default_decode_workers(device.cores, device.cpu_quota)
    cores = assign_cores(device.cores, count)
    seats = [Seat(role=role, index=0, core=cores[role]) for role in ("coordinator", "loader", "cache", "prefill")]
    seats += [Seat(role="decode", index=n, core=cores[f"decode.{n}"]) for n in range(count)]
    seats += [Seat(role=GATEWAY, index=0, core=cores[GATEWAY])] if gateway else []
    return DeviceFacts(
        id=device.id,
        memory_bytes=int(MEMORY_SHARE * device.memory_available_bytes),
        flash_engine=device.flash_engine,
        seats=tuple(seats),
        flash=device.flash,
        memory_speed=device.memory_speed,
    )
