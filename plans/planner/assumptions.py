"""Assumptions of a plan about what was not measured: one reason for each, with the command that measures it, if any."""

from __future__ import annotations

from collections.abc import Iterator

from neuronpipe.plans.cost.activation_rates import ASSUMED_FIRED, profile_for
from neuronpipe.plans.cost.work_cost import (
    ASSUMED_READ_DELAY_US,
    ASSUMED_READ_FACTOR,
    ASSUMED_READ_US,
    ASSUMED_READ_US_PER_KIB,
    ASSUMED_STEP_FACTOR,
    ASSUMED_TOKEN_WEIGHTS_PER_S,
)
from neuronpipe.plans.device.device import FlashCurve, MemorySpeed
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import DEFAULT_BACKEND, Mode
from neuronpipe.plans.plan.runtime_memory import runtime_of

_PROMPTS = f"a core multiplies {ASSUMED_TOKEN_WEIGHTS_PER_S / 1e9:g} G weights of a prompt a second"
_ACTIVITY = "`neuronpipe profile PACKAGE --activity` measures it"


def assumptions(
    manifest: Manifest,
    mode: Mode,
    *,
    all_resident: bool,
    curve: FlashCurve | None,
    speed: MemorySpeed | None,
    profile: DeviceProfile | None,
    prompts_by: str = DEFAULT_BACKEND,
) -> tuple[str, ...]:
    """Return the assumptions on the package, then those on the device; empty if nothing was assumed.

    all_resident: every cluster has a slot, so no misses are assumed
    prompts_by: backend of the prefill process
    """
    if profile is not None and not profile.decode and not profile.panels:
        profile = None  # it covers memory alone, as a start measures it for a small package
    return (
        *_of_package(manifest, mode, all_resident),
        *_of_device(curve, speed, profile),
        *_of_kernels(manifest, profile),
        *_of_runtime(prompts_by),
    )


def _of_package(manifest: Manifest, mode: Mode, all_resident: bool) -> Iterator[str]:
    if not manifest.model.all_neurons_fire and manifest.fired_by_layer is None:
        yield f"assumed, since the package states none: {ASSUMED_FIRED:.0%} of the neurons fire"
    if all_resident:
        return
    mode_profile = manifest.profile(mode)
    profile = profile_for(manifest, mode)
    if profile is None:
        yield f"assumed, without an activity profile: it misses as other models did; {_ACTIVITY}"
    elif not profile.misses:
        yield f"assumed, since the activity profile has no misses: it misses as other models did; {_ACTIVITY}"
    elif mode_profile is None:
        yield (
            f"assumed, without an activity profile of {mode} mode: it misses as in exact mode; "
            f"`neuronpipe profile PACKAGE --activity --mode {mode}` measures it"
        )


def _of_runtime(prompts_by: str) -> Iterator[str]:
    if runtime_of(prompts_by) is not None:
        yield f"prompts: how fast {prompts_by} computes them is not measured, so no speed of prompts is expected"


def _of_device(curve: FlashCurve | None, speed: MemorySpeed | None, profile: DeviceProfile | None) -> Iterator[str]:
    if profile is None:
        yield (
            f"assumed, without a device profile: computing keeps up with memory, a read takes {ASSUMED_READ_US:g} us "
            f"and {ASSUMED_READ_US_PER_KIB:g} us for each KiB of a processor, {_PROMPTS}, barriers and messages take "
            "nothing; `neuronpipe profile device` measures these"
        )
    elif profile.decode and not profile.steps:  # as measured at a start
        yield (
            f"assumed, without a device profile: a step takes {ASSUMED_STEP_FACTOR:g} times as long as its kernels, a "
            f"read {ASSUMED_READ_FACTOR * ASSUMED_READ_US:g} us and {ASSUMED_READ_US_PER_KIB:g} us for each KiB of a "
            f"processor, and is {ASSUMED_READ_DELAY_US:g} us late; `neuronpipe profile device` measures these"
        )
    missing = [name for name, figure in (("flash", curve), ("memory", speed)) if figure is None]
    if missing:
        yield f"{' and '.join(missing)}: speed not measured, so what depends on it is not expected"
    if curve is not None and not curve.direct:
        yield "flash was measured through the page cache, since its file system has no direct I/O: it may be slower"


def _of_kernels(manifest: Manifest, profile: DeviceProfile | None) -> Iterator[str]:
    if profile is None:
        return
    quantization, gates = manifest.quantization, manifest.trigger_quantization
    tokens, panels, reused = (
        {point.quantization for point in points} for points in (profile.decode, profile.panels, profile.reused)
    )
    # The file of a simulated device may have no decode kernels at all: its cores compute as fast as memory is read.
    assumed = ["computing keeps up with memory"] if tokens and quantization not in tokens else []
    assumed += [] if quantization in panels & reused else [_PROMPTS]
    if assumed:
        yield (
            f"assumed, since the device profile has no kernels of {quantization} for it: {', '.join(assumed)}; "
            "`neuronpipe profile device` measures them"
        )
    if tokens and gates not in tokens and quantization in tokens:
        yield (
            f"assumed, since the device profile has no kernels of {gates} gates: they compute as many bytes as "
            f"{quantization} does; `neuronpipe profile device` measures them"
        )
