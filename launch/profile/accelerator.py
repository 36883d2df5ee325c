"""Measurement of an accelerator for a device profile: the requested one, else the first one available."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable

from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.protocol.errors import UserError

BACKEND = "opencl"


def accelerator_options(backend: str | None) -> str | None:
    """Return the backend's options that select the device; None if there is none to measure.

    backend: the requested one; None: the first device, unless it is the processor itself, which a driver may offer too

    Raises UserError if the requested one is not available.
    """
    name, _, options = (backend or BACKEND).partition(":")
    if name != BACKEND:
        raise UserError(f"--backend accelerator={backend}: those of {BACKEND} are measured")
    if backend is None and importlib.util.find_spec("pyopencl") is None:
        return None
    from neuronpipe.services.offload.gpu.device import describe

    try:
        device = describe(options)
    except UserError:
        if backend is None:
            return None
        raise
    return None if backend is None and device.is_processor else options


def accelerator_count(options: str | None) -> int:
    """Return the number of measurements of the device that these options select; 0 for None."""
    if options is None:
        return 0
    from neuronpipe.services.offload.gpu.gpu_measurement import POINTS

    return POINTS


def with_accelerator(profile: DeviceProfile, options: str | None, progress: Callable[[], None]) -> DeviceProfile:
    """Return the profile with the measurements of the device that these options select; unchanged for None.

    progress: called `accelerator_count(options)` times

    Raises UserError if the driver fails.
    """
    if options is None:
        return profile
    from neuronpipe.services.offload.gpu.gpu_measurement import measure_accelerator

    return dataclasses.replace(profile, accelerator=measure_accelerator(options, progress))
