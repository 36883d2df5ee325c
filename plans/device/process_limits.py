"""What the kernel lets this process have: cores, processor time, memory. Read from /sys, /proc and the control groups.

Everything takes `root`, so that tests can show it another machine's files. A file that is missing, unreadable or says
nothing means "no limit known", never an error: containers, phones and old kernels all leave some out.

    what        control group v1                            control group v2
    quota       cpu.cfs_quota_us / cpu.cfs_period_us        cpu.max ("max 100000" or "50000 100000")
    limit       memory.limit_in_bytes                       memory.max
    in use      memory.usage_in_bytes                       memory.current
    reclaimable memory.stat total_inactive_file             memory.stat inactive_file
    waiting     -                                           memory.pressure
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from neuronpipe.plans.device.cores import Core, Source, classify
from neuronpipe.protocol.frozen import frozen


@frozen(kw_only=True)
class Memory:
    """Bytes: of the machine or of the control group, whichever is less; and what of these could be had now."""

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
    """Lines of "name value" or "name: value kB", each value as it stands."""
    return {name: int(value) for name, value in re.findall(r"^(\w+):?\s+([0-9]+)", _text(path), re.M)}


def read_cores(root: Path, allowed: Iterable[int]) -> tuple[Core, ...]:
    """All cores of the machine, with speeds from cpu_capacity if every core has it, else the clocks, else all alike."""
    may_use = frozenset(allowed)
    folder = root / "sys/devices/system/cpu"
    names = (re.fullmatch(r"cpu([0-9]+)", path.name) for path in sorted(folder.glob("cpu[0-9]*")))
    ids = sorted({int(name.group(1)) for name in names if name} | may_use)
    sources: tuple[tuple[Source, str], ...] = (("capacity", "cpu_capacity"), ("frequency", "cpufreq/cpuinfo_max_freq"))
    for source, name in sources:
        speeds = {id: _number(folder / f"cpu{id}" / name) or 0 for id in ids}
        if min(speeds.values(), default=0) > 0:
            return classify(speeds, source, may_use)
    return classify(dict.fromkeys(ids, 1), "equal", may_use)


def read_processor(root: Path) -> str:
    """The model of the first processor, as the kernel names it; empty where it does not.

    Processors of a phone that sleep have no entry, so that others than the first come and go.
    """
    text = _text(root / "proc/cpuinfo")
    found = re.search(r"^(?:model name|Hardware|uarch)\s*:\s*(\S.*)$", text, re.M)
    if found is None:
        found = re.search(r"^(CPU implementer\s*:.*)\n(?:.*\n){0,4}?(CPU part\s*:.*)$", text, re.M)
    return " ".join(" ".join(found.groups()).split()) if found else ""


def _control_groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Folders of our group and its ancestors for a v1 controller, and in v2 (True), innermost first."""
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
            # In a container the path is the host's and not there: then the mount itself is our group.
            for depth in range(len(parts), -1, -1):
                folder = mount.joinpath(*parts[:depth])
                if folder.is_dir():
                    yield folder, controllers == ""


def read_cpu_quota(root: Path) -> float | None:
    """Processor time this process may use, in cores (0.5: half of one); None without a quota."""
    quotas = []
    for folder, second in _control_groups(root, "cpu"):
        if second:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def read_stalled_share(root: Path) -> float:
    """The share of the last ten seconds in which some task waited for memory, 0..1: of the control group where the
    kernel tells that (`memory.pressure`), else of the machine (`/proc/pressure/memory`); 0 where it tells neither."""
    for path in pressure_files(root):
        if found := re.search(r"^some avg10=(\d+(?:\.\d+)?)", _text(path), re.M):
            return float(found[1]) / 100
    return 0.0


def read_oom_kills(root: Path) -> int:
    """How many processes the kernel killed for want of memory since it started; 0 where it does not tell."""
    found = re.search(r"^oom_kill (\d+)$", _text(root / "proc/vmstat"), re.M)
    return int(found[1]) if found else 0


def pressure_files(root: Path) -> tuple[Path, ...]:
    """Where the kernel tells how long tasks waited for memory: the control group's file, if there may be one, then the
    machine's. Not all of them need exist."""
    groups = [folder / "memory.pressure" for folder, second in _control_groups(root, "memory") if second]
    return (*groups[:1], root / "proc/pressure/memory")


def read_memory(root: Path) -> Memory:
    """The machine's memory, cut to the control group's limit. Page cache that can be dropped counts as available."""
    machine = _table(root / "proc/meminfo")
    total = 1024 * machine.get("MemTotal", 0)
    available = 1024 * machine.get("MemAvailable", machine.get("MemFree", 0))
    for folder, second in _control_groups(root, "memory"):
        limit = _number(folder / ("memory.max" if second else "memory.limit_in_bytes"))
        if limit is None or limit >= total:
            continue  # "max", or v1's way of saying it: a number beyond any memory
        used = _number(folder / ("memory.current" if second else "memory.usage_in_bytes")) or 0
        reclaimable = _table(folder / "memory.stat").get("inactive_file" if second else "total_inactive_file", 0)
        total = limit
        available = min(available, max(0, limit - used + reclaimable))
    return Memory(total_bytes=total, available_bytes=available)
