"""Facts of a device for the planner: its processes on cores, and its measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from neuronpipe.plans.cost.speed_range import is_brief
from neuronpipe.plans.cost.token_time import Measurements
from neuronpipe.plans.device.cores import Core, assign_cores, default_decode_workers
from neuronpipe.plans.device.device import DESCRIBED, Device, FlashCurve, FlashEngine, MemorySpeed
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.plan.document import ACCELERATOR, GATEWAY, ProcessSpec
from neuronpipe.plans.plan.offloaded_blocks import Accelerator
from neuronpipe.protocol.frozen import frozen

MEMORY_SHARE = 0.7  # of the memory available now, if the user names no limit
# A device that is measured in a busy moment seems to compute with one worker as fast as with two: Granite-4-H-Tiny was
# planned at 5.0 tokens/s with one worker and 4.5 with two, and decoded 7.6 and 10 to 13.
BRIEF_MIN_GAIN = 0.3


@frozen(kw_only=True)
class DeviceFacts:
    """The facts of a device that the planner uses. `flash`, `memory_speed` and `profile` are None if not measured.

    is_described: the facts are those of a description, which are no measurements that may be wrong
    """

    id: str
    memory_bytes: int  # the memory limit, unless the user sets one
    flash_engine: FlashEngine
    processes: tuple[ProcessSpec, ...]
    flash: FlashCurve | None = None
    memory_speed: MemorySpeed | None = None
    profile: DeviceProfile | None = None  # of `neuronpipe profile device` while it is valid, else measured at a start
    accelerator: Accelerator | None = None  # computes blocks of decode steps; None: no accelerator process

    is_described: bool = False

    @property
    def min_gain(self) -> float:
        """The gain, relative, from which on another number of workers than the rules' is chosen."""
        return 0.0 if self.is_described or not is_brief(self.measured) else BRIEF_MIN_GAIN

    @property
    def measured(self) -> Measurements:
        """The measurements, in the order of the cost model's parameters."""
        return self.flash, self.memory_speed, self.profile


def device_facts(
    device: Device,
    workers: int | None = None,
    *,
    gateway: bool = False,
    backends: Mapping[str, str] | None = None,
    cores: Sequence[Core] | None = None,
    accelerator: Accelerator | None = None,
) -> DeviceFacts:
    """Return the facts of a device, with the processes of a run assigned to its cores.

    workers: number of decode workers (default: `default_decode_workers`)
    backends: backends by role; other roles have the default
    cores: used instead of the device's cores
    accelerator: adds an accelerator process
    """
    cores = device.cores if cores is None else cores
    count = workers or default_decode_workers(cores, device.cpu_quota)
    places = assign_cores(cores, count)
    processes = [
        ProcessSpec(role=role, index=0, core=places[role]) for role in ("coordinator", "loader", "cache", "prefill")
    ]
    processes += [ProcessSpec(role="decode", index=n, core=places[f"decode.{n}"]) for n in range(count)]
    processes += [ProcessSpec(role=GATEWAY, index=0, core=places[GATEWAY])] if gateway else []
    if accelerator is not None:  # it shares the coordinator's core, since it mostly waits for its device
        processes.append(ProcessSpec(role=ACCELERATOR, index=0, core=places["coordinator"]))
    backend_of_role = backends or {}
    processes = [dataclasses.replace(spec, backend=backend_of_role.get(spec.role, spec.backend)) for spec in processes]
    return DeviceFacts(
        is_described=device.architecture == DESCRIBED,
        id=device.id,
        memory_bytes=int(MEMORY_SHARE * device.memory_available_bytes),
        flash_engine=device.flash_engine,
        processes=tuple(processes),
        flash=device.flash,
        memory_speed=device.memory_speed,
        profile=device.profile,
        accelerator=accelerator,
    )
