"""Probing this machine: what a plan needs to know of it, in a few milliseconds once the flash curve is on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import mmap
import os
import resource
from pathlib import Path

from neuronpipe.native import ffi, lib
from neuronpipe.plans.device.device import Device, FlashCurve, curve_from_json
from neuronpipe.plans.device.flash import io_uring_allowed, measure
from neuronpipe.plans.device.limits import read_cores, read_cpu_quota, read_memory
from neuronpipe.protocol.errors import UserError

BUNDLES = "bundles.bin"
CACHE_VERSION = 1


def probe(directory: Path, *, brief: bool = True) -> Device:
    """The device as seen by this process, with the flash that the package in `directory` lies on.

    brief: the flash curve of an earlier probe of this device and file system, else a short measurement (0.15 s).
    Otherwise it is measured anew and in more points (0.5 s). Either is kept for later starts.
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
    kept = _kept_curve_path(device, directory)
    curve = _read_curve(kept) if brief else None
    if curve is None:
        curve = measure(bundles, brief=brief)
        if curve is not None:
            _keep_curve(kept, curve)
    return dataclasses.replace(device, flash=curve)


def _instruction_set() -> str:
    name = lib.np_isa_name()
    if name == ffi.NULL:
        names = ffi.string(lib.np_isa_names()).decode()
        raise UserError(
            f"NEURONPIPE_ISA={os.environ.get('NEURONPIPE_ISA')}: not an instruction set of this machine; it has {names}"
        )
    return str(ffi.string(name).decode())


def _kept_curve_path(device: Device, directory: Path) -> Path:
    """One file per device and file system, in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    system = os.statvfs(directory)
    key = f"{CACHE_VERSION} {device.id} {os.stat(directory).st_dev} {system.f_fsid} {system.f_blocks * system.f_frsize}"
    return Path(cache) / "neuronpipe" / f"flash-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _read_curve(path: Path) -> FlashCurve | None:
    """What an earlier probe kept; None when there is none, or none that can be understood."""
    try:
        return curve_from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep_curve(path: Path, curve: FlashCurve) -> None:
    """Keep it for the next start. A home that cannot be written only costs that start a measurement."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(dataclasses.asdict(curve)), encoding="utf-8")
        fresh.rename(path)
