"""Measurement of a whole device profile: kernels, memory and flash, an accelerator, and the steps of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from neuronpipe.launch.profile.accelerator import accelerator_count, with_accelerator
from neuronpipe.launch.profile.steps import steps_count, with_steps
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.measure.device_measurement import measure_profile
from neuronpipe.plans.measure.machine_load import MachineLoad


def measure_device_profile(
    directory: Path,
    device: Device,
    accelerator: str | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DeviceProfile:
    """Measure the profile of a device, and of the flash that the package in `directory` lies on.

    accelerator: options of the accelerator to measure, as `accelerator_options` returns them
    progress: receives the numbers of measurements done and of all

    Raises UserError if flash cannot be read.
    """
    steps = steps_count(device, accelerator=accelerator is not None) + accelerator_count(accelerator)
    done_steps, total = 0, 1

    def report_profile(profile_done: int, profile_total: int) -> None:
        nonlocal done_steps, total
        done_steps, total = profile_done, profile_total + steps
        progress(done_steps, total)

    def report_step() -> None:
        nonlocal done_steps
        done_steps += 1
        progress(done_steps, total)

    profile = measure_profile(directory, progress=report_profile)
    load = MachineLoad()  # a load that begins now hardly shows in the whole time, but may double that of steps
    profile = with_accelerator(profile, accelerator, report_step)
    profile = with_steps(profile, device, report_step)
    progress(total, total)
    return dataclasses.replace(profile, busy=max(profile.busy, round(load.processor_share(), 3)))
