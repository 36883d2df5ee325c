"""Which OpenCL device computes, and whether its arithmetic is what equal bits need. pyopencl is imported here alone,
and only by who asked for this backend."""

from __future__ import annotations

import functools
import json
import shlex
import subprocess
import sys
from types import ModuleType
from typing import Any

from neuronpipe.plans.plan.offloaded_blocks import Accelerator
from neuronpipe.protocol.errors import UserError, quoted
from neuronpipe.protocol.frozen import frozen

INSTALL = f"`{shlex.quote(sys.executable)} -m pip install pyopencl`"
DESCRIBE_WITHIN_S = 60
FACTS = ("name", "memory_bytes", "max_buffer_bytes", "shares_memory", "is_processor")
"""What others may know of a device."""


@frozen(kw_only=True)
class Device:
    """One device. handle: pyopencl's. max_buffer_bytes: of one buffer. shares_memory: it has none of its own, but this
    machine's. is_processor: it computes on this machine's cores. divides_exactly: floats, as a processor does; else it
    can divide them in double precision."""

    handle: Any
    name: str
    memory_bytes: int
    max_buffer_bytes: int
    shares_memory: bool
    is_processor: bool
    divides_exactly: bool


@functools.cache
def opencl() -> ModuleType:
    """pyopencl. Raises UserError where it is not installed."""
    try:
        import pyopencl
    except ImportError as error:
        raise UserError(f"backend opencl: pyopencl cannot be imported ({error}); install it with {INSTALL}") from None
    module: ModuleType = pyopencl
    return module


def find_device(wanted: str = "") -> Device:
    """The device whose name, or whose platform's, has `wanted` in it; else the first GPU, else the first device. Raises
    UserError where there is none, or none whose arithmetic suffices."""
    cl = opencl()
    try:
        platforms = cl.get_platforms()
    except cl.Error:
        platforms = []
    if not platforms:
        raise UserError(
            "backend opencl: this machine has no OpenCL platform; install your GPU's OpenCL driver (or, to compute on "
            "the processor, the package pocl-opencl-icd)"
        )
    handles = [handle for platform in platforms for handle in _devices(cl, platform)]
    if not handles:
        raise UserError("backend opencl: the OpenCL platforms here have no device; `clinfo` says what a driver finds")
    named = [handle for handle in handles if wanted.lower() in f"{handle.platform.name}: {handle.name}".lower()]
    if not named:
        names = ", ".join(handle.name.strip() for handle in handles)
        raise UserError(f"backend opencl:{quoted(wanted)}: no device is called that; there are {names}")
    gpus = [handle for handle in named if handle.type & cl.device_type.GPU]
    return _checked(cl, (gpus or named)[0])


def _devices(cl: ModuleType, platform: Any) -> list[Any]:
    try:
        return list(platform.get_devices())
    except cl.Error:
        return []


def _checked(cl: ModuleType, handle: Any) -> Device:
    """Raises UserError for arithmetic that cannot give a processor's bits."""
    name = handle.name.strip()
    has = cl.device_fp_config
    floats = handle.single_fp_config
    for needed, what in (
        (has.ROUND_TO_NEAREST, "does not round floats to the nearest"),
        (has.INF_NAN, "has no infinite floats"),
        (has.DENORM, "takes very small floats for zero"),
    ):
        if not floats & needed:
            raise UserError(f"backend opencl: {name} {what}, so it cannot give the processor's bits; leave it out")
    exact = bool(floats & has.CORRECTLY_ROUNDED_DIVIDE_SQRT)
    if not exact and not handle.double_fp_config:
        raise UserError(f"backend opencl: {name} cannot divide as exactly as a processor; leave it out")
    if not (handle.available and handle.compiler_available and handle.endian_little):
        raise UserError(f"backend opencl: {name} is not available, has no compiler or another order of bytes")
    return Device(
        handle=handle,
        name=name,
        memory_bytes=handle.global_mem_size,
        max_buffer_bytes=handle.max_mem_alloc_size,
        shares_memory=bool(handle.host_unified_memory),
        is_processor=bool(handle.type & cl.device_type.CPU),
        divides_exactly=exact,
    )


def describe(wanted: str) -> Accelerator:
    """The device that `find_device` finds, by another process: a driver takes memory, and does not outlive a fork.
    Raises UserError as it does."""
    command = [sys.executable, "-m", __name__, wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DESCRIBE_WITHIN_S, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"backend opencl: the driver did not answer within {DESCRIBE_WITHIN_S} s") from None
    try:
        found = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise UserError(f"backend opencl: the driver failed: {quoted(last)}") from None
    if "error" in found:
        raise UserError(found["error"])
    return Accelerator(**found)


def _say(wanted: str) -> None:
    try:
        found = find_device(wanted)
    except UserError as error:
        print(json.dumps({"error": str(error)}))
        return
    print(json.dumps({name: getattr(found, name) for name in FACTS}))


if __name__ == "__main__":
    _say(sys.argv[1])
