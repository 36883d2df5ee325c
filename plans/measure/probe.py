"""Probe of this machine: the facts and measurements that a plan needs. It takes milliseconds if these are cached."""

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
from neuronpipe.plans.device.storage import mounted, read_storage
from neuronpipe.plans.measure.cached_profile import (
    CachedMeasurement,
    cache_measurement,
    cached_or_measured,
    doubt,
    read_cached,
    remeasure,
    usable_profile,
)
from neuronpipe.plans.measure.flash_reads import io_uring_allowed, measure_curve
from neuronpipe.plans.measure.kernel_speed import Case, kernel_cases
from neuronpipe.plans.measure.machine_load import MachineLoad
from neuronpipe.plans.measure.profile_confirmation import faster_curve, with_better
from neuronpipe.plans.package.manifest import MANIFEST
from neuronpipe.plans.package.parsing.parse import read_manifest
from neuronpipe.plans.package.reader import neurons_file
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

CACHE_VERSION = 9
ENGINES = ("io_uring", "threads")
CACHED_BYTES = 32 << 20  # a processor's cache may hold a smaller package
CONFIRM_AFTER_S = 600.0  # age from which on a device profile is confirmed: a load at its time may have ended
CACHE_VARIABLE = "XDG_CACHE_HOME"
ROOT = Path("/")


def probe(
    directory: Path,
    *,
    brief: bool = True,
    cases: Sequence[Case] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Device:
    """Return the device as this process sees it, with the flash that the package in `directory` lies on.

    Without a package nothing is measured. Results are cached for later starts, as cached_profile.py describes, if this
    user has a home. Raises UserError if flash cannot be read.

    brief: use the device profile if it is valid, else cached measurements, else measure briefly (0.2 s for flash, 1 s
        for memory and the package's kernels, 3 s with those of the whole catalog). False: measure longer (1 s for
        flash, 3 s for the rest)
    cases: kernels to measure unless there is a device profile; None: those of the package
    say: receives a line when something was measured again
    """
    device, neurons = this_device(), neurons_file(directory)
    if neurons is None:
        return device
    storage = read_storage(ROOT, os.stat(neurons.parent).st_dev)
    device = dataclasses.replace(device, storage=storage)
    profile = _cached_device_profile(device, directory, say) if brief else None
    cores, cases = decode_cores(device), _kernel_cases(directory) if cases is None else tuple(cases)
    flash_path = _cache_path("flash", device, _storage_names(directory)[0], device.flash_engine)
    memory_path = _cache_path("memory", device, repr(_allowed(device)), repr(cases))

    def flash() -> FlashCurve | None:
        return _measure_flash(neurons, brief=brief)

    def memory() -> DeviceProfile | None:
        return measure_memory(device, cores, cases, brief=brief)

    if not brief:
        if (curve := flash()) is not None:
            cache_measurement(flash_path, curve)
        if (measured := memory()) is not None:
            cache_measurement(memory_path, measured)
        speed = measured.memory_speed() if measured else None
        curve = None if curve is None else storage.applied_to(curve)
        return dataclasses.replace(device, flash=curve, memory_speed=speed, profile=measured)
    # A later start on a quiet machine measures briefly, and its figures replace the profile's if they are faster.
    is_confirmation_due = profile is not None and time.time() > profile.taken_at + CONFIRM_AFTER_S
    curve = profile.flash_curve() if profile else None
    if curve is None or is_confirmation_due:
        curve = faster_curve(
            curve, cached_or_measured(flash_path, "flash", FlashCurve, flash, say, only_quiet=is_confirmation_due)
        )
    later = None
    if profile is None or not profile.dram or is_confirmation_due:
        later = cached_or_measured(memory_path, "memory", DeviceProfile, memory, say, only_quiet=is_confirmation_due)
    profile = later if profile is None else with_better(profile, later)
    speed = (profile.memory_speed() if profile else None) or (later.memory_speed() if later else None)
    curve = None if curve is None else storage.applied_to(curve)
    return dataclasses.replace(device, flash=curve, memory_speed=speed, profile=profile)


@frozen(kw_only=True)
class CacheState:
    """The cached measurements that starts of a package may use; each is None if there is none.

    profile: device profile, also if it is not used
    why_not: the reason why it is not used
    """

    profile: DeviceProfile | None
    why_not: str | None
    memory: CachedMeasurement[DeviceProfile] | None
    flash: CachedMeasurement[FlashCurve] | None


def cache_state(directory: Path) -> CacheState:
    """Return the cached measurements that starts of the package in `directory` may use."""
    device, lines = this_device(), list[str]()
    place, allowed, cases = _storage_names(directory)[0], repr(_allowed(device)), repr(_kernel_cases(directory))
    path, why_not = _cache_path("profile", device, place, device.flash_engine), None
    used = _cached_device_profile(device, directory, lines.append)
    profile = used
    if used is None and path is not None and path.exists():
        with contextlib.suppress(UserError):
            profile = read_profile(path)
        why_not = (doubt(profile) if profile else None) or "; ".join(lines)
    return CacheState(
        profile=profile,
        why_not=why_not,
        memory=read_cached(_cache_path("memory", device, allowed, cases), DeviceProfile),
        flash=read_cached(_cache_path("flash", device, place, device.flash_engine), FlashCurve),
    )


def has_device_profile(directory: Path) -> bool:
    """Return True if starts of the package in `directory` use a device profile that has measured runs."""
    profile = _cached_device_profile(this_device(), directory, lambda line: None)
    return profile is not None and bool(profile.steps)


def remeasure_memory(directory: Path, why: str, say: Callable[[str], None]) -> None:
    """Measure memory and the kernels of the package in `directory` again, and cache the result.

    why: the reason, for the line that `say` receives
    """
    device, cases = this_device(), _kernel_cases(directory)
    path = _cache_path("memory", device, repr(_allowed(device)), repr(cases))

    def memory() -> DeviceProfile | None:
        return measure_memory(device, decode_cores(device), cases, brief=False)

    remeasure(path, "memory", why, DeviceProfile, memory, say)


def remeasure_flash(directory: Path, why: str, say: Callable[[str], None]) -> None:
    """Measure the flash of the package in `directory` again, and cache the result. Parameters as `remeasure_memory`."""
    device, neurons = this_device(), neurons_file(directory)
    if neurons is None:
        return
    path = _cache_path("flash", device, _storage_names(directory)[0], device.flash_engine)
    remeasure(path, "flash", why, FlashCurve, lambda: _measure_flash(neurons, brief=False), say)


def _measure_flash(neurons: Path, *, brief: bool) -> FlashCurve | None:
    load = MachineLoad()
    curve = measure_curve(neurons, brief=brief)
    busy = max(load.processor_share(), load.storage_share())
    return None if curve is None else dataclasses.replace(curve, busy=round(busy, 3))


def measure_memory(
    device: Device, cores: Sequence[int | None], cases: Sequence[Case], *, brief: bool
) -> DeviceProfile | None:
    """Measure memory and these kernels, as `measure_briefly`. It is imported here as most starts do not need it."""
    from neuronpipe.plans.measure.brief_measurement import measure_briefly

    return measure_briefly(device, cores, cases, brief=brief)


def _kernel_cases(directory: Path) -> tuple[Case, ...]:
    """Return the kernels to measure for the package in `directory`.

    Empty if the package cannot be read, or if a processor's cache may hold it: kernels are measured with rows in
    memory.
    """
    try:
        neurons = neurons_file(directory)
        if neurons is None or neurons.stat().st_size < CACHED_BYTES:
            return ()
        return kernel_cases(read_manifest(directory / MANIFEST))
    except (OSError, UserError):
        return ()


def this_device() -> Device:
    """Return the facts about the device that need no measurement."""
    memory = read_memory(ROOT)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Device(
        architecture=os.uname().machine,
        instruction_set=_instruction_set(),
        cores=read_cores(ROOT, os.sched_getaffinity(0)),
        cpu_quota=read_cpu_quota(ROOT),
        memory_total_bytes=memory.total_bytes,
        memory_available_bytes=memory.available_bytes,
        page_bytes=mmap.PAGESIZE,
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        io_uring=io_uring_allowed(Path("/proc/self/exe")),
        flash=None,
        processor=read_processor(ROOT),
    )


def profile_path(device: Device, directory: Path) -> Path:
    """Return the path of the cached device profile for the file system of the package in `directory`.

    Raises UserError if this user has no home.
    """
    path = _cache_path("profile", device, _storage_names(directory)[0], device.flash_engine)
    if path is None:
        raise UserError(f"this user has no home folder to cache the profile in; set {CACHE_VARIABLE} to a folder")
    return path


def decode_cores(device: Device) -> list[int | None]:
    """Return the core of each decode worker (None: not pinned), with the default number of workers."""
    count = default_decode_workers(device.cores, device.cpu_quota)
    processes = assign_cores(device.cores, count)
    return [processes[f"decode.{number}"] for number in range(count)]


def _allowed(device: Device) -> tuple[int, Kind]:
    """Return the default number of decode workers, and the kind of the fastest allowed core."""
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


def _cached_device_profile(device: Device, directory: Path, say: Callable[[str], None]) -> DeviceProfile | None:
    """Return the valid device profile for this device and file system; None if there is none.

    A profile that was measured with the other flash engine is used without its flash figures, for example in a
    container that forbids io_uring. One that was measured without the limits of this process's control groups is used
    with these limits.
    """
    for engine in sorted(ENGINES, key=lambda engine: engine != device.flash_engine):
        for storage in _storage_names(directory):
            path = _cache_path("profile", device, storage, engine)
            profile = None if path is None else usable_profile(path, device.id, _allowed(device), say)
            if profile is not None:
                return profile if engine == device.flash_engine else dataclasses.replace(profile, flash=None)
    return None


def _storage_names(directory: Path) -> tuple[str, ...]:
    """Return the names of the storage of a package's neurons; without a package, of that of the directory.

    Measurements are cached under the first name. It has the limits of this process's control groups, because figures
    measured within them are wrong outside. The name without limits follows.
    """
    neurons = neurons_file(directory)
    folder = directory if neurons is None else neurons.parent
    name, limits = file_system(folder), read_storage(ROOT, os.stat(folder).st_dev).limits
    return (f"{name}, {limits}", name) if limits else (name,)


def file_system(directory: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """Return a name of a directory's file system that is the same with every mount, inside a container and outside.

    It is the file system's own id, since a device number may change with the next mount, and a size may be a quota. An
    overlay (a container's root) has a new id in each container, so it is named by the size that it reports. A file
    system without an id (FUSE, NFS) is named by its type and source.
    """
    system = os.statvfs(directory)
    device_number = os.stat(directory).st_dev
    mount = mounted(device_number, mountinfo)
    if mount is not None and "overlay" in mount[0]:
        return f"overlay {system.f_blocks * system.f_frsize}"
    if system.f_fsid:
        return str(system.f_fsid)
    if mount is not None:
        return " ".join(mount)
    return f"{device_number} {system.f_fsid} {system.f_blocks * system.f_frsize}"


def cache_folder() -> Path | None:
    """Return this program's folder in the user's cache folder. It may not exist yet.

    None if this user has no home; then nothing is cached. A relative XDG_CACHE_HOME is ignored, as the XDG
    specification demands.
    """
    cache = os.environ.get(CACHE_VARIABLE, "")
    if not os.path.isabs(cache):
        try:
            cache = str(Path.home() / ".cache")
        except RuntimeError:  # no HOME, and the user is not in the password database
            return None
    return Path(cache) / "neuronpipe"


def _cache_path(what: str, device: Device, *place: str) -> Path | None:
    """Return the path of a cached measurement; None if this user has no home.

    It depends on the release of the kernel, whose scheduler and drivers decide the speed of reads and waits.

    place: what the measurement depends on besides the device and the kernel
    """
    key = " ".join([str(CACHE_VERSION), device.id, os.uname().release, *place])
    folder = cache_folder()
    return None if folder is None else folder / f"{what}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
