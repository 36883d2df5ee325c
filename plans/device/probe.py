"""Probing this machine: what a plan needs to know of it, in a few milliseconds once the flash curve is on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import mmap
import os
import resource
from collections.abc import Callable
from pathlib import Path

from neuronpipe.native import ffi, lib
from neuronpipe.plans.device.busy import Busyness
from neuronpipe.plans.device.cores import assign_cores, default_decode_workers
from neuronpipe.plans.device.device import Device, FlashCurve, MemorySpeed
from neuronpipe.plans.device.flash import io_uring_allowed, measure
from neuronpipe.plans.device.kept import keep, kept_or_measured, kept_profile
from neuronpipe.plans.device.limits import read_cores, read_cpu_quota, read_memory
from neuronpipe.plans.device.memory import measure_memory
from neuronpipe.protocol.errors import UserError

BUNDLES = "bundles.bin"
CACHE_VERSION = 5
CACHE_VARIABLE = "XDG_CACHE_HOME"


def probe(directory: Path, *, brief: bool = True, say: Callable[[str], None] = lambda line: None) -> Device:
    """The device as seen by this process, with the flash that the package in `directory` lies on.

    brief: what `neuronpipe profile device` has measured, where there is such a profile and nothing speaks against it;
    else the speeds that an earlier probe of this device and file system measured, else a short measurement (0.2 s for
    flash, 0.3 s for memory, up to twice that on a busy machine). Otherwise they are measured anew and in more points (1
    s each). Either is kept for later starts, as long as nothing speaks against it (kept.py) and this user has a home:
    `say` gets a line when something was measured again. Without a package neither is measured.
    Raises UserError when flash cannot be read.
    """
    device, bundles = this_device(), directory / BUNDLES
    if not bundles.is_file():
        return device
    place = _file_system(directory)
    profile_file = _kept_path("profile", device, place) if brief else None
    profile = None if profile_file is None else kept_profile(profile_file, device.id, say)
    if profile is not None:
        device = dataclasses.replace(device, profile=profile)
    flash_path, memory_path = _kept_path("flash", device, place), _kept_path("memory", device)

    def flash() -> FlashCurve | None:
        busy = Busyness()
        curve = measure(bundles, brief=brief)
        busy_share = max(busy.processors(), busy.storage())
        return None if curve is None else dataclasses.replace(curve, busy=round(busy_share, 3))

    def memory_speed() -> MemorySpeed | None:
        busy = Busyness()
        speed = measure_memory(decode_cores(device), device.memory_available_bytes, brief=brief)
        return None if speed is None else dataclasses.replace(speed, busy=round(busy.processors(), 3))

    if brief:
        curve, speed = (profile.flash_curve(), profile.memory_speed()) if profile else (None, None)
        return dataclasses.replace(
            device,
            flash=curve or kept_or_measured(flash_path, "flash", FlashCurve, flash, say),
            memory_speed=speed or kept_or_measured(memory_path, "memory", MemorySpeed, memory_speed, say),
        )
    if (curve := flash()) is not None:
        keep(flash_path, curve)
    if (speed := memory_speed()) is not None:
        keep(memory_path, speed)
    return dataclasses.replace(device, flash=curve, memory_speed=speed)


def this_device() -> Device:
    """What can be seen of the device without measuring."""
    root = Path("/")
    memory = read_memory(root)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Device(
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


def profile_path(device: Device, directory: Path) -> Path:
    """Where the device profile is kept, with the file system that `directory` lies on. Raises UserError where this user
    has no home."""
    path = _kept_path("profile", device, _file_system(directory))
    if path is None:
        raise UserError(f"this user has no home folder to keep the profile in; set {CACHE_VARIABLE} to a folder")
    return path


def decode_cores(device: Device) -> list[int | None]:
    """The core of each decode worker, as a plan has them when nobody asks for another number."""
    count = default_decode_workers(device.cores, device.cpu_quota)
    processes = assign_cores(device.cores, count)
    return [processes[f"decode.{number}"] for number in range(count)]


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


def cache_folder() -> Path | None:
    """This program's folder in the user's cache folder, whether or not it exists; None where this user has no home:
    nothing is kept. A relative XDG_CACHE_HOME counts as none, as its specification says."""
    cache = os.environ.get(CACHE_VARIABLE, "")
    if not os.path.isabs(cache):
        try:
            cache = str(Path.home() / ".cache")
        except RuntimeError:  # no HOME, and nobody knows this user
            return None
    return Path(cache) / "neuronpipe"


def _kept_path(what: str, device: Device, place: str = "") -> Path | None:
    """One file per device and place; None where nothing is kept."""
    if (folder := cache_folder()) is None:
        return None
    key = f"{CACHE_VERSION} {device.id} {place}"
    return folder / f"{what}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
