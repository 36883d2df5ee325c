"""Probing this machine: what a plan needs to know of it, in a few milliseconds once the flash curve is on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import mmap
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from neuronpipe.native import ffi, lib
from neuronpipe.plans.device.cores import assign_cores, default_decode_workers
from neuronpipe.plans.device.device import Device, FlashCurve, MemorySpeed, curve_from_json, memory_speed_from_json
from neuronpipe.plans.device.flash import io_uring_allowed, measure
from neuronpipe.plans.device.limits import read_cores, read_cpu_quota, read_memory
from neuronpipe.plans.device.memory import measure_memory
from neuronpipe.plans.package.whole_file import whole_file
from neuronpipe.protocol.errors import UserError

Measured = TypeVar("Measured", FlashCurve, MemorySpeed)

BUNDLES = "bundles.bin"
CACHE_VERSION = 4


def probe(directory: Path, *, brief: bool = True) -> Device:
    """The device as seen by this process, with the flash that the package in `directory` lies on.

    brief: the speeds that an earlier probe of this device and file system measured, else a short measurement (0.2 s for
    flash, 0.3 s for memory). Otherwise they are measured anew and in more points (1 s each). Either is kept for later
    starts. Without a package neither is measured.
    Raises UserError when flash cannot be read.
    """
    root = Path("/")
    memory = read_memory(root)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    bundles = directory / BUNDLES
    device = Device(
        architecture=os.uname().machine,
        instruction_set=_instruction_set(),
        cores=read_cores(root, os.sched_getaffinity(0)),
        cpu_quota=read_cpu_quota(root),
        memory_total_bytes=memory.total_bytes,
        memory_available_bytes=memory.available_bytes,
        page_bytes=mmap.PAGESIZE,
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        io_uring=io_uring_allowed(Path("/proc/self/exe")),
        flash=None,
    )
    if not bundles.is_file():
        return device
    kept = _kept_path("flash", device, _file_system(directory))
    curve = _kept(kept, curve_from_json) if brief else None
    if curve is None:
        curve = measure(bundles, brief=brief)
        _keep(kept, curve)
    kept = _kept_path("memory", device)
    speed = _kept(kept, memory_speed_from_json) if brief else None
    if speed is None:
        speed = measure_memory(_decode_cores(device), device.memory_available_bytes, brief=brief)
        _keep(kept, speed)
    return dataclasses.replace(device, flash=curve, memory_speed=speed)


def _decode_cores(device: Device) -> list[int | None]:
    count = default_decode_workers(device.cores, device.cpu_quota)
    seats = assign_cores(device.cores, count)
    return [seats[f"decode.{number}"] for number in range(count)]


def _instruction_set() -> str:
    name = lib.np_isa_name()
    if name == ffi.NULL:
        names = ffi.string(lib.np_isa_names()).decode()
        raise UserError(
            f"NEURONPIPE_ISA={os.environ.get('NEURONPIPE_ISA')}: not an instruction set of this machine; it has {names}"
        )
    return str(ffi.string(name).decode())


def _file_system(directory: Path) -> str:
    system = os.statvfs(directory)
    return f"{os.stat(directory).st_dev} {system.f_fsid} {system.f_blocks * system.f_frsize}"


def _kept_path(what: str, device: Device, place: str = "") -> Path:
    """One file per device and place, in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    key = f"{CACHE_VERSION} {device.id} {place}"
    return Path(cache) / "neuronpipe" / f"{what}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _kept(path: Path, parse: Callable[[dict[str, Any]], Measured]) -> Measured | None:
    """What an earlier probe kept; None when there is none, or none that can be understood."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(path: Path, measured: FlashCurve | MemorySpeed | None) -> None:
    """Keep it for the next start. A home that cannot be written only costs that start a measurement."""
    if measured is None:
        return
    with contextlib.suppress(OSError, UserError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as place:
            place.write_text(json.dumps(dataclasses.asdict(measured)), encoding="utf-8")
