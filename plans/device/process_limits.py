"""Limits that the kernel sets for this process (cores, processor time, memory), from /sys, /proc and control groups.

Every function takes `root`, the folder in place of "/", so that tests can provide another machine's files. A file that
is missing, unreadable or malformed means that a limit is unknown, never an error: containers, phones and old kernels
omit some of them.

    value       control group v1                            control group v2
    quota       cpu.cfs_quota_us / cpu.cfs_period_us        cpu.max ("max 100000" or "50000 100000")
    limit       memory.limit_in_bytes                       memory.max
    used        memory.usage_in_bytes                       memory.current
    reclaimable memory.stat total_inactive_file             memory.stat inactive_file
    waiting     -                                           memory.pressure
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from neuronpipe.plans.device.cores import Core, Source, classify
from neuronpipe.protocol.frozen import frozen


@frozen(kw_only=True)
class Memory:
    """Memory of the machine, or of the control group if that is less, and how much of it is available now."""

    total_bytes: int
    available_bytes: int


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if re.fullmatch(r"-?[0-9]+", text) else None


def _table(path: Path) -> dict[str, int]:
    """Parse lines of "name value" or "name: value kB" into unscaled integers."""
    return {name: int(value) for name, value in re.findall(r"^(\w+):?\s+([0-9]+)", _text(path), re.M)}


def read_cores(root: Path, allowed: Iterable[int]) -> tuple[Core, ...]:
    """Return all cores of the machine, in order of their ids, with their siblings of one physical core.

    Their speeds are cpu_capacity if every core has it, else the maximum clock rate if every core has it, else equal.
    """
    may_use = frozenset(allowed)
    folder = root / "sys/devices/system/cpu"
    names = (re.fullmatch(r"cpu([0-9]+)", path.name) for path in sorted(folder.glob("cpu[0-9]*")))
    ids = sorted({int(name.group(1)) for name in names if name} | may_use)
    cores = classify(*_core_speeds(folder, ids), may_use)
    return tuple(replace(core, physical=_first_sibling(folder / f"cpu{core.id}")) for core in cores)


def _core_speeds(folder: Path, ids: Iterable[int]) -> tuple[dict[int, int], Source]:
    sources: tuple[tuple[Source, str], ...] = (("capacity", "cpu_capacity"), ("frequency", "cpufreq/cpuinfo_max_freq"))
    for source, name in sources:
        speeds = {id: _number(folder / f"cpu{id}" / name) or 0 for id in ids}
        if min(speeds.values(), default=0) > 0:
            return speeds, source
    return dict.fromkeys(ids, 1), "equal"


def _first_sibling(folder: Path) -> int | None:
    """Return the first logical processor of the physical core of a logical one; None if it is unknown."""
    text = _text(folder / "topology/core_cpus_list") or _text(folder / "topology/thread_siblings_list")
    first = re.match(r"[0-9]+", text)
    return int(first[0]) if first else None


def read_processor(root: Path) -> str:
    """Return the model name of the first processor in /proc/cpuinfo, or else its implementer and part; may be empty.

    The first entry is the same every time, while sleeping processors of a phone have none.
    """
    text = _text(root / "proc/cpuinfo")
    match = re.search(r"^(?:model name|Hardware|uarch)\s*:\s*(\S.*)$", text, re.M)
    if match is None:
        match = re.search(r"^(CPU implementer\s*:.*)\n(?:.*\n){0,4}?(CPU part\s*:.*)$", text, re.M)
    return " ".join(" ".join(match.groups()).split()) if match else ""


def control_groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield (folder, is_v2) for our control group and its ancestors, innermost first."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "?", "")
        if controllers == "":
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            mounts = [root / "sys/fs/cgroup" / controllers, root / "sys/fs/cgroup" / controller]
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for mount in mounts:
            # Inside a container, the path may be the host's and not exist: then our group is the mount itself.
            for depth in range(len(parts), -1, -1):
                folder = mount.joinpath(*parts[:depth])
                if folder.is_dir():
                    yield folder, controllers == ""


def read_cpu_quota(root: Path) -> float | None:
    """Return the processor time that this process may use, in cores (0.5: half of a core); None without a quota."""
    quotas = []
    for folder, is_v2 in control_groups(root, "cpu"):
        if is_v2:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def read_stalled_share(root: Path) -> float:
    """Return the share of the last ten seconds in which some task waited for memory, 0..1; 0 if it is unknown.

    It is that of the control group if known, else that of the machine.
    """
    for path in pressure_files(root):
        if match := re.search(r"^some avg10=(\d+(?:\.\d+)?)", _text(path), re.M):
            return float(match[1]) / 100
    return 0.0


def read_oom_kills(root: Path) -> int:
    """Return the number of out-of-memory kills since boot; 0 if the kernel does not report it."""
    match = re.search(r"^oom_kill (\d+)$", _text(root / "proc/vmstat"), re.M)
    return int(match[1]) if match else 0


def pressure_files(root: Path) -> tuple[Path, ...]:
    """Return the files that report waiting for memory: that of a version 2 control group, if any, and the machine's.

    They may not exist.
    """
    groups = [folder / "memory.pressure" for folder, is_v2 in control_groups(root, "memory") if is_v2]
    return (*groups[:1], root / "proc/pressure/memory")


def read_memory(root: Path) -> Memory:
    """Return the memory of the machine or, where they are smaller, the limits of its control groups.

    Page cache that the kernel can reclaim counts as available.
    """
    machine = _table(root / "proc/meminfo")
    total = 1024 * machine.get("MemTotal", 0)
    available = 1024 * machine.get("MemAvailable", machine.get("MemFree", 0))
    for folder, is_v2 in control_groups(root, "memory"):
        limit = _number(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
        if limit is None or limit >= total:
            continue  # no limit: "max", or in version 1 a number larger than any memory
        used = _number(folder / ("memory.current" if is_v2 else "memory.usage_in_bytes")) or 0
        reclaimable = _table(folder / "memory.stat").get("inactive_file" if is_v2 else "total_inactive_file", 0)
        total = limit
        available = min(available, max(0, limit - used + reclaimable))
    return Memory(total_bytes=total, available_bytes=available)
