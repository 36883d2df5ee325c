"""Checks of this machine, with advice.

Each check answers one question that a run depends on. "fail": no run can start; "warn": runs are slower or lack
something. A check that raises UserError, OSError or ImportError is a finding as well.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from neuronpipe.launch.formats import show_bytes
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.pull.package_library import packages_folder
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.run_directory import RunDirectory

if TYPE_CHECKING:
    from neuronpipe.plans.device.device import Device, FlashCurve
    from neuronpipe.plans.device.profile import DeviceProfile

MIN_PYTHON = (3, 11)
LOW_MEMORY_BYTES = 512 << 20
LOW_DISK_BYTES = 1 << 30
MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


@frozen(kw_only=True)
class Check:
    """One finding.

    advice: what to do next; empty if all is well
    """

    name: str
    state: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""


def checks(directory: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> list[Check]:
    """Run all checks, for a package in `directory`. Measures flash and memory, which takes seconds.

    progress: called with the number of finished steps and of all steps
    """
    steps: list[Callable[[], list[Check]]] = [
        lambda: [_guarded("python", _python), _guarded("compiler", _compiler), _guarded("kernels", _kernels)],
        lambda: _device_checks(directory) if findings[-1].state != "fail" else [],
        lambda: [
            _guarded("shared memory", _shared_memory),
            _guarded("run directory", _run_directory),
            _guarded("free disk", lambda: _free_disk(_next_package(directory))),
            _guarded("settings", _settings),
        ],
        lambda: _npu_checks(directory),
    ]
    findings: list[Check] = []
    for number, step in enumerate(steps):
        progress(number, len(steps))
        findings += step()
    return findings


def _npu_checks(directory: Path) -> list[Check]:
    try:
        from neuronpipe.launch.doctor import npu

        return npu.npu_checks(directory)
    except (UserError, OSError, ImportError) as error:
        return [Check(name="neural chip", state="warn", found=str(error), advice="prompts are computed by the CPU")]


def render(findings: list[Check]) -> str:
    """Return the findings as text, one per line, with each advice below its finding."""
    lines = []
    for check in findings:
        lines.append(f"{MARKS[check.state]}  {check.name:<14} {check.found}")
        if check.advice:
            lines.append(f"{'':21}-> {check.advice}")
    return "\n".join(lines) + "\n"


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except UserError as error:
        return Check(name=name, state="fail", found=str(error), advice="put this right, then run the doctor again")
    except (OSError, ImportError) as error:
        return Check(
            name=name, state="fail", found=f"{type(error).__name__}: {error}", advice=_ADVICE_WHEN_BROKEN[name]
        )


_ADVICE_WHEN_BROKEN = {
    "python": "install Python 3.11 or newer",
    "compiler": "install gcc or clang",
    "kernels": "compile them: start launch/neuronpipe from the checkout, or install the package again",
    "device": "check that /proc and /sys can be read and that the package's files are yours",
    "shared memory": "the kernel must offer memfd_create with sealing (Linux 3.17 or newer)",
    "run directory": "set TMPDIR to a folder that can be written, with a short path",
    "free disk": "name a package directory that exists",
    "settings": "make the file readable, or name another one with NEURONPIPE_CONFIG",
}


def _settings() -> Check:
    """Check the settings of all verbs: otherwise a mistake would only show when its verb is used."""
    from neuronpipe.launch.arguments.verbs import read_settings, verb_parser

    settings = read_settings()
    for verb in settings.verbs:
        settings.apply(verb, verb_parser(verb))
    options = "; ".join(f"{verb}: {', '.join(settings.of(verb)) or 'nothing'}" for verb in settings.verbs)
    return Check(name="settings", state="ok", found=f"{settings.file or 'no file'}: {options or 'none'}")


def _python() -> Check:
    summary = f"{platform.python_version()} at {sys.executable}"
    return Check(name="python", state="ok" if sys.version_info >= MIN_PYTHON else "fail", found=summary)


def _compiler() -> Check:
    path = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if path is None:
        advice = "only needed to change the kernels; install gcc or clang then"
        return Check(name="compiler", state="warn", found="none", advice=advice)
    return Check(name="compiler", state="ok", found=path)


def _kernels() -> Check:
    from neuronpipe.native import ffi, lib

    supported, name = ffi.string(lib.np_isa_names()).decode(), lib.np_isa_name()
    if name == ffi.NULL:
        summary = f"NEURONPIPE_ISA={os.environ.get('NEURONPIPE_ISA')} is not one of {supported}"
        return Check(name="kernels", state="fail", found=summary, advice="unset NEURONPIPE_ISA, or name one of these")
    used = ffi.string(name).decode()
    summary = f"{used} in use, this machine runs {supported}; prompts {_prompt_kernels(used)}"
    if used == "scalar":
        advice = "slow: there are no kernels for this processor's vector instructions, or NEURONPIPE_ISA says scalar"
        return Check(name="kernels", state="warn", found=summary, advice=advice)
    return Check(name="kernels", state="ok", found=summary)


def _prompt_kernels(used: str) -> str:
    """Return which kernels compute prompts, and why not faster ones."""
    from neuronpipe.native import ffi, lib

    if used == "amx":
        return "on the matrix engine (AMX)"
    if used != "avx512":
        return "row by row"
    missing = lib.np_isa_amx_lacks()
    reason = "NEURONPIPE_ISA says avx512" if missing == ffi.NULL else ffi.string(missing).decode()
    return f"as panels (AVX-512): {reason}"


def _device_checks(directory: Path) -> list[Check]:
    try:
        from neuronpipe.plans.measure.probe import probe

        device = probe(directory, brief=False)
    except (UserError, OSError) as error:
        return [Check(name="device", state="fail", found=str(error), advice=_ADVICE_WHEN_BROKEN["device"])]
    return [
        _cores(device),
        _memory(device),
        _locked_memory(device),
        _io_uring(device),
        _flash(device, directory),
        _memory_speed(device),
        _storage(device),
    ]


def _cores(device: Device) -> Check:
    allowed = [core for core in device.cores if core.allowed]
    from neuronpipe.plans.device.cores import physical_cores

    kinds = ", ".join(
        f"{count} {kind}" for kind in ("big", "mid", "little") if (count := sum(core.kind == kind for core in allowed))
    )
    summary = f"{kinds}; {len(allowed)} of {len(device.cores)} allowed, {device.architecture}"
    if (physical := physical_cores(device.cores)) < len(allowed):
        summary += f"; siblings (SMT) share {physical} physical cores"
    if device.cpu_quota is not None and device.cpu_quota < len(allowed):
        advice = "the control group's CPU quota stops all workers at times; raise it for even speed"
        return Check(name="cores", state="warn", found=f"{summary}, quota {device.cpu_quota:g} cores", advice=advice)
    return Check(name="cores", state="ok", found=summary)


def _memory(device: Device) -> Check:
    summary = f"{show_bytes(device.memory_available_bytes)} of {show_bytes(device.memory_total_bytes)} available"
    if device.memory_available_bytes < LOW_MEMORY_BYTES:
        advice = "close other programs, or name a limit that fits with --memory"
        return Check(name="memory", state="warn", found=summary, advice=advice)
    return Check(name="memory", state="ok", found=summary)


def _locked_memory(device: Device) -> Check:
    limit = device.memlock_bytes
    if limit is None or limit >= device.memory_total_bytes:
        return Check(name="locked memory", state="ok", found="no limit" if limit is None else show_bytes(limit))
    advice = "weights may be swapped out when memory is short; raise the limit with `ulimit -l unlimited` if you may"
    return Check(name="locked memory", state="warn", found=f"at most {show_bytes(limit)}", advice=advice)


def _io_uring(device: Device) -> Check:
    if device.io_uring:
        return Check(name="io_uring", state="ok", found="allowed")
    advice = "flash is read by a pool of threads instead, with more work per read"
    return Check(name="io_uring", state="warn", found="not allowed here", advice=advice)


def _storage(device: Device) -> Check:
    storage = device.storage
    if storage is None:
        return Check(name="storage", state="ok", found="no package")
    summary = storage.file_system or "unknown file system"
    if storage.limits:
        summary += f", limited to {storage.limits} by a control group"
    if storage.is_network:
        advice = "reads depend on a network; copy the package to a local disk"
        return Check(name="storage", state="warn", found=f"{summary}, a network file system", advice=advice)
    advice = "raise io.max (or blkio.throttle) of the control group for faster reads" if storage.limits else ""
    return Check(name="storage", state="warn" if advice else "ok", found=summary, advice=advice)


def _flash(device: Device, directory: Path) -> Check:
    curve = device.flash
    if curve is None:
        summary = f"not measured: {directory} holds no package, or a very small one"
        return Check(name="flash", state="warn", found=summary, advice="name a package: `neuronpipe doctor PACKAGE`")
    speeds = ", ".join(f"{size} KiB {curve.bytes_per_s(size << 10, 32) / 1e6:.0f}" for size in (4, 8, 64, 256, 1024))
    summary = f"random reads at depth 32, MB/s: {speeds}; one 4 KiB read {4096e6 / curve.bytes_per_s(4096, 1):.0f} us"
    if curve.direct:
        return _checked_figures("flash", summary, curve)
    advice = "no direct I/O on this file system: copies also fill the page cache; put the package on internal storage"
    return Check(name="flash", state="warn", found=summary, advice=advice)


def _memory_speed(device: Device) -> Check:
    speed = device.memory_speed
    if speed is None or device.profile is None:
        advice = "name a package, and close other programs when memory is short"
        return Check(name="memory speed", state="warn", found="not measured", advice=advice)
    pieces = ", ".join(f"{point.piece_bytes:,} B {point.bytes_per_s / 1e9:.1f}" for point in speed.pieces)
    summary = (
        f"reading, GB/s: one core {speed.one_thread_bytes_per_s / 1e9:.1f}, "
        f"{speed.threads} decode core(s) {speed.sequential_bytes_per_s / 1e9:.1f}; in pieces of {pieces}"
    )
    return _checked_figures("memory speed", summary, device.profile)


def _checked_figures(name: str, summary: str, measured: FlashCurve | DeviceProfile) -> Check:
    from neuronpipe.plans.measure.cached_profile import doubt

    if (reason := doubt(measured)) is None:
        return Check(name=name, state="ok", found=summary)
    advice = f"these figures may be too low: {reason}; run the doctor again when the machine is quiet"
    return Check(name=name, state="warn", found=summary, advice=advice)


def _shared_memory() -> Check:
    import fcntl

    descriptor = os.memfd_create("neuronpipe-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, 4096)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
    finally:
        os.close(descriptor)
    return Check(name="shared memory", state="ok", found="memfd_create, with sealing")


def _run_directory() -> Check:
    directory = RunDirectory.create()
    directory.remove()
    return Check(name="run directory", state="ok", found=f"{directory.path.parent} can be written, sockets fit")


def _next_package(directory: Path) -> Path:
    """Return where the next package will lie: beside the named one; for the demo, where `pull` stores packages."""
    if directory != DEMO:
        return directory
    folder = packages_folder()
    return next(parent for parent in (folder, *folder.parents) if parent.is_dir())


def _free_disk(directory: Path) -> Check:
    free_bytes = shutil.disk_usage(directory).free
    summary = f"{show_bytes(free_bytes)} at {directory}"
    if free_bytes < LOW_DISK_BYTES:
        advice = "make room before converting a model there"
        return Check(name="free disk", state="warn", found=summary, advice=advice)
    return Check(name="free disk", state="ok", found=summary)
