"""The accelerator of a plan: the one that --backend names, or the one that a device profile has measured."""

from __future__ import annotations

import dataclasses

from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import ACCELERATOR
from neuronpipe.plans.plan.offloaded_blocks import Accelerator
from neuronpipe.protocol.errors import UserError


def named_accelerator(backend: str | None, memory_bytes: int | None, manifest: Manifest) -> Accelerator | None:
    """Return the device of a backend; None without a backend.

    backend: the value of --backend for the accelerator
    memory_bytes: the value of --gpu-memory

    Raises UserError if there is no such device, if it cannot compute this model, or for --gpu-memory without a backend.
    """
    if backend is None:
        if memory_bytes is not None:
            raise UserError(
                f"--gpu-memory belongs to an accelerator, and none is named or measured; name one with --backend "
                f"{ACCELERATOR}=opencl, or measure it with `neuronpipe profile device`"
            )
        return None
    from neuronpipe.services.offload.offload_backend import OffloadBackend
    from neuronpipe.services.steps.backend import create_backend, require

    offload_backend = create_backend(backend, "accelerator")
    require(offload_backend, manifest, "accelerator", f"--backend {ACCELERATOR}={backend}")
    assert isinstance(offload_backend, OffloadBackend)
    return dataclasses.replace(offload_backend.describe(), limit_bytes=memory_bytes)


def measured_accelerator(
    profile: DeviceProfile | None, memory_bytes: int | None, manifest: Manifest
) -> tuple[Accelerator, str] | None:
    """Return the device of a device profile, and its backend; None if there is none, or it cannot compute this model.

    Does not call the driver, which would take time and memory.
    """
    measured = profile.accelerator if profile is not None else None
    if measured is None:
        return None
    from neuronpipe.services.steps.backend import create_backend

    if create_backend(measured.backend, "accelerator").supports(manifest, "accelerator") is not None:
        return None
    accelerator = Accelerator(
        name=measured.name,
        memory_bytes=measured.memory_bytes,
        max_buffer_bytes=measured.max_buffer_bytes,
        shares_memory=measured.shares_memory,
        is_processor=measured.is_processor,
        limit_bytes=memory_bytes,
    )
    return accelerator, measured.backend


def why_unusable(accelerator: Accelerator, backend: str) -> str | None:
    """Return why a device that was measured earlier cannot be used now; None if it can."""
    from neuronpipe.services.offload.gpu.device import describe

    try:
        device = describe(backend.partition(":")[2])
    except UserError as error:
        return str(error)
    if device.name != accelerator.name:
        return f"the first device is now {device.name}; `neuronpipe profile device` measures it"
    return None
