"""The choice of an OpenCL device, and the check that its arithmetic can reproduce the processor's bits.

Only this module imports pyopencl, and only when the backend is used.
"""

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
from neuronpipe.protocol.schema import from_json, json_object

INSTALL = f"`{shlex.quote(sys.executable)} -m pip install pyopencl`"
DESCRIBE_WITHIN_S = 60
FACTS = ("name", "memory_bytes", "max_buffer_bytes", "shares_memory", "is_processor")
"""The fields of `Device` that plans and device profiles record."""


@frozen(kw_only=True)
class Device:
    """An OpenCL device.

    handle: pyopencl's object
    max_buffer_bytes: the largest size of one buffer
    shares_memory: True if it uses this machine's memory
    is_processor: True if it computes on this machine's cores
    divides_exactly: True if float division is correctly rounded; otherwise it divides in double precision
    """

    handle: Any
    name: str
    memory_bytes: int
    max_buffer_bytes: int
    shares_memory: bool
    is_processor: bool
    divides_exactly: bool


@functools.cache
def opencl() -> ModuleType:
    """Import pyopencl. Raises UserError if it is not installed."""
    try:
        import pyopencl
    except ImportError as error:
        raise UserError(f"backend opencl: pyopencl cannot be imported ({error}); install it with {INSTALL}") from None
    module: ModuleType = pyopencl
    return module


def find_device(name: str = "") -> Device:
    """Return the first GPU, else the first device, whose name or platform's name contains `name`.

    Raises UserError if there is none, or if it cannot reproduce a processor's bits.
    """
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
    matching = [handle for handle in handles if name.lower() in f"{handle.platform.name}: {handle.name}".lower()]
    if not matching:
        names = ", ".join(handle.name.strip() for handle in handles)
        raise UserError(f"backend opencl:{quoted(name)}: no device is called that; there are {names}")
    gpus = [handle for handle in matching if handle.type & cl.device_type.GPU]
    return _checked(cl, (gpus or matching)[0])


def _devices(cl: ModuleType, platform: Any) -> list[Any]:
    try:
        return list(platform.get_devices())
    except cl.Error:
        return []


def _checked(cl: ModuleType, handle: Any) -> Device:
    """Return the device. Raises UserError if its arithmetic cannot reproduce a processor's bits."""
    name = handle.name.strip()
    flags = cl.device_fp_config
    floats = handle.single_fp_config
    for required, lack in (
        (flags.ROUND_TO_NEAREST, "does not round floats to the nearest"),
        (flags.INF_NAN, "has no infinite floats"),
        (flags.DENORM, "flushes denormal floats to zero"),
    ):
        if not floats & required:
            raise UserError(f"backend opencl: {name} {lack}, so it cannot give the processor's bits; leave it out")
    exact = bool(floats & flags.CORRECTLY_ROUNDED_DIVIDE_SQRT)
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


def describe(name: str) -> Accelerator:
    """Describe the device that `find_device` returns. Raises UserError as `find_device`, or if the driver fails.

    It runs in a process of its own, because a driver takes memory and does not survive a fork.
    """
    command = [sys.executable, "-m", __name__, name]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=DESCRIBE_WITHIN_S, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"backend opencl: the driver did not answer within {DESCRIBE_WITHIN_S} s") from None
    printed = completed.stdout.strip().splitlines()[-1:]  # a driver may print lines before
    try:
        facts = json_object("".join(printed).encode(), "the driver")
    except UserError:
        last = (completed.stderr.strip().splitlines() or [f"status {completed.returncode}"])[-1]
        raise UserError(f"backend opencl: the driver failed: {quoted(last)}") from None
    if "error" in facts:
        raise UserError(str(facts["error"]))
    return from_json(Accelerator, facts, "backend opencl: the driver")


def _print_facts(name: str) -> None:
    try:
        device = find_device(name)
    except UserError as error:
        print(json.dumps({"error": str(error)}))
        return
    print(json.dumps({fact: getattr(device, fact) for fact in FACTS}))


if __name__ == "__main__":
    _print_facts(sys.argv[1])
