"""The accelerator of a device profile: the one that was asked for, else the one that is found."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable

from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.protocol.errors import UserError

BACKEND = "opencl"


def accelerator_options(backend: str | None) -> str | None:
    """The options of the backend by which a device is found; None where there is none to measure. backend: what was
    asked for; None: whatever there is, but for the processor itself, which a driver may offer too. Raises UserError
    where what was asked for is not there."""
    name, _, options = (backend or BACKEND).partition(":")
    if name != BACKEND:
        raise UserError(f"--backend accelerator={backend}: those of {BACKEND} are measured")
    if backend is None and importlib.util.find_spec("pyopencl") is None:
        return None
    from neuronpipe.services.offload.gpu.device import describe

    try:
        found = describe(options)
    except UserError:
        if backend is None:
            return None
        raise
    return None if backend is None and found.is_processor else options


def accelerator_count(options: str | None) -> int:
    """How many figures there are of it."""
    if options is None:
        return 0
    from neuronpipe.services.offload.gpu.gpu_measurement import POINTS

    return POINTS


def with_accelerator(profile: DeviceProfile, options: str | None, progress: Callable[[], None]) -> DeviceProfile:
    """The profile and what was measured of the device that these options find. progress is called
    `accelerator_count(options)` times. Raises UserError where its driver fails."""
    if options is None:
        return profile
    from neuronpipe.services.offload.gpu.gpu_measurement import measure_accelerator

    return dataclasses.replace(profile, accelerator=measure_accelerator(options, progress))
