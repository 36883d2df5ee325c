"""Probing this machine: what a plan needs to know of it, in a few milliseconds once the flash curve is on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import mmap
import os
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from neuronpipe.native import ffi, lib
from neuronpipe.plans.device.cores import Kind, assign_cores, default_decode_workers
from neuronpipe.plans.device.device import Device, FlashCurve
from neuronpipe.plans.device.process_limits import read_cores, read_cpu_quota, read_memory, read_processor
from neuronpipe.plans.device.profile import DeviceProfile, read_profile
from neuronpipe.plans.measure.cached_profile import (
    CachedMeasurement,
    cached_or_measured,
    doubt,
    keep,
    read_cached,
    remeasure,
    usable_profile,
    write_profile,
)
from neuronpipe.plans.measure.flash_reads import io_uring_allowed, measure_curve
from neuronpipe.plans.measure.kernel_speed import Case, kernel_cases
from neuronpipe.plans.measure.machine_load import MachineLoad
from neuronpipe.plans.measure.profile_confirmation import faster_curve, with_better
from neuronpipe.plans.package.manifest import MANIFEST
from neuronpipe.plans.package.parse import read_manifest
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

BUNDLES = "bundles.bin"
CACHE_VERSION = 6
FORMER_CACHE_VERSION = 5  # whose files have limits and rights in their names
ENGINES = ("io_uring", "threads")
CACHED_BYTES = 32 << 20
CONFIRM_AFTER_S = 600.0  # after a device profile was measured: what kept the machine busy then may be over
CACHE_VARIABLE = "XDG_CACHE_HOME"


def probe(directory: Path, *, brief: bool = True, say: Callable[[str], None] = lambda line: None) -> Device:
    """The device as seen by this process, with the flash that the package in `directory` lies on.

    brief: what `neuronpipe profile device` has measured, where there is such a profile and nothing speaks against it;
    else the speeds that an earlier probe of this device and file system measured, else a short measurement (0.2 s for
    flash; 1 s for memory and the package's kernels). Otherwise they are measured anew and longer (1 s for flash, 3 s
    for the others). Either is kept for later starts, as long as nothing speaks against it (cached_profile.py) and
    this user has a
    home: `say` gets a line when something was measured again. Without a package neither is measured.
    Raises UserError when flash cannot be read.
    """
    device, bundles = this_device(), directory / BUNDLES
    if not bundles.is_file():
        return device
    profile = _kept_device_profile(device, directory, say) if brief else None
    cores, cases = decode_cores(device), _kernel_cases(directory)
    flash_path = _kept_path("flash", device, file_system(directory), device.flash_engine)
    memory_path = _kept_path("memory", device, repr(_allowed(device)), repr(cases))

    def flash() -> FlashCurve | None:
        busy = MachineLoad()
        curve = measure_curve(bundles, brief=brief)
        busy_share = max(busy.processor_share(), busy.storage_share())
        return None if curve is None else dataclasses.replace(curve, busy=round(busy_share, 3))

    def memory() -> DeviceProfile | None:
        return measure_memory(device, cores, cases, brief=brief)

    if not brief:
        if (curve := flash()) is not None:
            keep(flash_path, curve)
        if (measured := memory()) is not None:
            keep(memory_path, measured)
        speed = measured.memory_speed() if measured else None
        return dataclasses.replace(device, flash=curve, memory_speed=speed, profile=measured)
    # A profile is no reason to measure nothing more: a quiet start later confirms it, or finds better figures.
    checks = profile is not None and time.time() > profile.taken_at + CONFIRM_AFTER_S
    curve = profile.flash_curve() if profile else None
    if curve is None or checks:
        curve = faster_curve(curve, cached_or_measured(flash_path, "flash", FlashCurve, flash, say, only_quiet=checks))
    later = None
    if profile is None or not profile.dram or checks:
        later = cached_or_measured(memory_path, "memory", DeviceProfile, memory, say, only_quiet=checks)
    profile = later if profile is None else with_better(profile, later)
    speed = (profile.memory_speed() if profile else None) or (later.memory_speed() if later else None)
    return dataclasses.replace(device, flash=curve, memory_speed=speed, profile=profile)


@frozen(kw_only=True)
class CacheState:
    """What is kept of a device for a package's starts; None: nothing. profile: also one that does not hold."""

    profile: DeviceProfile | None
    why_not: str | None  # the profile is not used
    memory: CachedMeasurement[DeviceProfile] | None
    flash: CachedMeasurement[FlashCurve] | None


def cache_state(directory: Path) -> CacheState:
    """Return what starts of the package in `directory` will go by."""
    device, lines = this_device(), list[str]()
    place, allowed, cases = file_system(directory), repr(_allowed(device)), repr(_kernel_cases(directory))
    path, why_not = _kept_path("profile", device, place, device.flash_engine), None
    used = _kept_device_profile(device, directory, lines.append)
    profile = used
    if used is None and path is not None and path.exists():
        with contextlib.suppress(UserError):
            profile = read_profile(path)
        why_not = (doubt(profile) if profile else None) or "; ".join(lines)
    return CacheState(
        profile=profile,
        why_not=why_not,
        memory=read_cached(_kept_path("memory", device, allowed, cases), DeviceProfile),
        flash=read_cached(_kept_path("flash", device, place, device.flash_engine), FlashCurve),
    )


def remeasure_memory(directory: Path, why: str, say: Callable[[str], None]) -> None:
    """Measure memory and kernels of the package in `directory` again, since a run was faster than they allow."""
    device, cases = this_device(), _kernel_cases(directory)
    path = _kept_path("memory", device, repr(_allowed(device)), repr(cases))

    def memory() -> DeviceProfile | None:
        return measure_memory(device, decode_cores(device), cases, brief=False)

    remeasure(path, "memory", why, DeviceProfile, memory, say)


def measure_memory(
    device: Device, cores: Sequence[int | None], cases: Sequence[Case], *, brief: bool
) -> DeviceProfile | None:
    """Measure memory and these kernels: see `measure_briefly`, which brings imports that most starts do not need."""
    from neuronpipe.plans.measure.brief_measurement import measure_briefly

    return measure_briefly(device, cores, cases, brief=brief)


def _kernel_cases(directory: Path) -> tuple[Case, ...]:
    """The kernels of the package in `directory`; none where there is none that can be read, or where a processor's
    cache holds it: kernels are measured on memory."""
    try:
        if (directory / BUNDLES).stat().st_size < CACHED_BYTES:
            return ()
        return kernel_cases(read_manifest(directory / MANIFEST))
    except (OSError, UserError):
        return ()


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
        processor=read_processor(root),
    )


def profile_path(device: Device, directory: Path) -> Path:
    """Return where the device profile is kept, with the file system that `directory` lies on. Raises UserError where
    this user has no home."""
    path = _kept_path("profile", device, file_system(directory), device.flash_engine)
    if path is None:
        raise UserError(f"this user has no home folder to keep the profile in; set {CACHE_VARIABLE} to a folder")
    return path


def decode_cores(device: Device) -> list[int | None]:
    """The core of each decode worker, as a plan has them when nobody asks for another number."""
    count = default_decode_workers(device.cores, device.cpu_quota)
    processes = assign_cores(device.cores, count)
    return [processes[f"decode.{number}"] for number in range(count)]


def _allowed(device: Device) -> tuple[int, Kind]:
    """How many decode workers there are unless somebody asks for another number, and the kind of the fastest core."""
    fastest = max((core for core in device.cores if core.allowed), key=lambda core: core.capacity)
    return default_decode_workers(device.cores, device.cpu_quota), fastest.kind


def _instruction_set() -> str:
    name = lib.np_isa_name()
    if name == ffi.NULL:
        names = ffi.string(lib.np_isa_names()).decode()
        raise UserError(
            f"NEURONPIPE_ISA={os.environ.get('NEURONPIPE_ISA')}: not an instruction set of this machine; it has {names}"
        )
    return str(ffi.string(name).decode())


def _kept_device_profile(device: Device, directory: Path, say: Callable[[str], None]) -> DeviceProfile | None:
    """Return the device profile that holds for this device and file system, or None.

    A profile that was measured through the other flash engine (as inside a container that forbids io_uring) serves
    without its figures of flash.
    """
    place = file_system(directory)
    _adopt_former_profile(device, directory)
    for engine in sorted(ENGINES, key=lambda engine: engine != device.flash_engine):
        path = _kept_path("profile", device, place, engine)
        profile = None if path is None else usable_profile(path, device.id, _allowed(device), say)
        if profile is not None:
            return profile if engine == device.flash_engine else dataclasses.replace(profile, flash=None)
    return None


def _adopt_former_profile(device: Device, directory: Path) -> None:
    """Move the profile that an earlier version kept for this device to where it is looked for now."""
    path = _kept_path("profile", device, file_system(directory), device.flash_engine)
    former = _path_of("profile", f"{FORMER_CACHE_VERSION} {device.former_id} {_former_file_system(directory)}")
    if path is None or former is None or path.exists() or not former.exists():
        return
    with contextlib.suppress(OSError, UserError):
        profile = read_profile(former)
        profile.check(device.former_id, str(former))
        write_profile(path, dataclasses.replace(profile, device_id=device.id))
        former.unlink()


def file_system(directory: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """Name the storage that a directory lies on: the same on every mount of it, inside a container and outside.

    A file system's own id says that, not its device number, which the next mount may change, nor its size, which may be
    a quota. An overlay (a container's root) has a new id in each container, so that the size of the file system below
    it has to do. A file system without an id (FUSE, NFS) is named by its type and source.
    """
    system = os.statvfs(directory)
    mounted = _mounted(os.stat(directory).st_dev, mountinfo)
    if mounted is not None and "overlay" in mounted[0]:
        return f"overlay {system.f_blocks * system.f_frsize}"
    if system.f_fsid:
        return str(system.f_fsid)
    return _former_file_system(directory) if mounted is None else " ".join(mounted)


def _mounted(device_number: int, mountinfo: Path) -> tuple[str, str] | None:
    """The type and the source of the mounted file system with this device number; None where the kernel does not
    tell."""
    wanted = f"{os.major(device_number)}:{os.minor(device_number)}"
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        mount, _, system = line.partition(" - ")
        fields = system.split(" ")
        if wanted in mount.split(" ")[2:3] and len(fields) > 1:
            return fields[0], fields[1]
    return None


def _former_file_system(directory: Path) -> str:
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


def _kept_path(what: str, device: Device, *place: str) -> Path | None:
    """One file per device and place; None where nothing is kept."""
    return _path_of(what, " ".join([str(CACHE_VERSION), device.id, *place]))


def _path_of(what: str, key: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / f"{what}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
