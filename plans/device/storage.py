"""The storage that a package lies on: its file system, and the limits that control groups set for reading it.

Every function takes `root`, the folder in place of "/", as in process_limits.py, and unknown facts are never an error.

    limit           control group v1                       control group v2
    bytes a second  blkio.throttle.read_bps_device         io.max ("8:0 rbps=1048576 riops=max ...")
    reads a second  blkio.throttle.read_iops_device        io.max

A limit names a whole disk, while a file's device number is that of a partition, of a volume on top of disks (device
mapper, RAID), or of no disk at all (btrfs, overlay). The limits of all disks below the file count. If these are
unknown, as in the root of a container, the limits of all disks count.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from neuronpipe.plans.device.device import FlashCurve
from neuronpipe.plans.device.process_limits import control_groups
from neuronpipe.protocol.frozen import frozen

NETWORK_TYPES = frozenset(
    {
        *("9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "lustre", "ncpfs", "nfs", "nfs4", "smb3", "smbfs"),
        *(f"fuse.{name}" for name in ("ceph", "gcsfuse", "glusterfs", "rclone", "s3fs", "smbnetfs", "sshfs")),
    }
)
"""Types of file systems whose files lie on another machine, or on the host of a virtual one."""
MIN_NETWORK_SPREAD = 0.5  # assumed: other users share the network and the server
MAX_DEPTH = 8  # of volumes on top of each other


@frozen(kw_only=True)
class Storage:
    """Facts about the storage of a package that need no measurement.

    file_system: its type as it is mounted, e.g. "ext4"; empty if unknown
    read_bytes_per_s, reads_per_s: limits of this process's control groups; None without a limit
    """

    file_system: str = ""
    read_bytes_per_s: float | None = None
    reads_per_s: float | None = None

    @property
    def is_network(self) -> bool:
        return self.file_system in NETWORK_TYPES

    @property
    def limits(self) -> str:
        """The limits in a few words; empty without one."""
        bytes_limit = "" if self.read_bytes_per_s is None else f"{self.read_bytes_per_s / 1e6:,.1f} MB/s"
        reads_limit = "" if self.reads_per_s is None else f"{self.reads_per_s:,.0f} reads/s"
        return " and ".join(filter(None, (bytes_limit, reads_limit)))

    def applied_to(self, curve: FlashCurve) -> FlashCurve:
        """Return the curve as this storage allows it: no faster than its limits, and less certain on a network."""
        reads_per_s, bytes_per_s = self.reads_per_s or math.inf, self.read_bytes_per_s or math.inf
        points = (
            dataclasses.replace(
                point, bytes_per_s=min(point.bytes_per_s, bytes_per_s, reads_per_s * point.request_bytes)
            )
            for point in curve.points
        )
        spread = max(curve.spread, MIN_NETWORK_SPREAD) if self.is_network else curve.spread
        return dataclasses.replace(curve, points=tuple(points), spread=spread)

    def notes(self) -> tuple[str, ...]:
        """Return sentences for a plan about what slows reads down; empty if nothing does."""
        lines = []
        if self.limits:
            lines.append(
                f"a control group limits reads of the package's disk to {self.limits}; the plan counts with that"
            )
        if self.is_network:
            lines.append(
                f"the package lies on a network file system ({self.file_system}), whose speed changes with its other "
                "users: the range is wide; a copy on a local disk is faster"
            )
        return tuple(lines)


def read_storage(root: Path, device_number: int) -> Storage:
    """Return the facts about the storage of a file. device_number: `st_dev` of the file"""
    mount = mounted(device_number, root / "proc/self/mountinfo")
    disks = _disks(root, _numbers(device_number), mount[1] if mount else "")
    limits: dict[str, list[float]] = {"rbps": [], "riops": []}
    for disk, name, limit in _limits(root):
        if not disks or disk in disks:
            limits[name].append(limit)
    return Storage(
        file_system=mount[0] if mount else "",
        read_bytes_per_s=min(limits["rbps"], default=None),
        reads_per_s=min(limits["riops"], default=None),
    )


def mounted(device_number: int, mountinfo: Path) -> tuple[str, str] | None:
    """Return (type, source) of the mounted file system with this device number; None if it is unknown."""
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        mount, _, system = line.partition(" - ")
        fields = system.split(" ")
        if _numbers(device_number) in mount.split(" ")[2:3] and len(fields) > 1:
            return fields[0], fields[1]
    return None


def _numbers(device_number: int) -> str:
    return f"{os.major(device_number)}:{os.minor(device_number)}"


def _disks(root: Path, numbers: str, source: str) -> frozenset[str]:
    """Return the numbers of all block devices below a file system, as "8:0"; empty if they are unknown.

    source: what is mounted, e.g. "/dev/sda2"; used if the device number is that of no block device
    """
    folder = root / "sys/dev/block" / numbers
    if not folder.exists():
        if not source.startswith("/dev/"):
            return frozenset()
        folder = root / "sys/class/block" / (root / source[1:]).resolve().name
    return frozenset(_below(folder, MAX_DEPTH))


def _below(folder: Path, depth: int) -> Iterator[str]:
    """Yield the numbers of a block device, of the disk that it is a partition of, and of the devices that it uses."""
    folder = folder.resolve()
    number = _text(folder / "dev")
    if not number or depth == 0:
        return
    yield number
    if (folder / "partition").exists():
        yield from _below(folder.parent, depth - 1)
    slaves = folder / "slaves"
    for slave in sorted(slaves.iterdir()) if slaves.is_dir() else ():
        yield from _below(slave, depth - 1)


def _limits(root: Path) -> Iterator[tuple[str, str, float]]:
    """Yield (disk, "rbps" or "riops", limit) for every limit of our control groups."""
    for folder, is_v2 in control_groups(root, "blkio"):
        if is_v2:
            for disk, values in re.findall(r"^(\d+:\d+) (.*)$", _text(folder / "io.max"), re.M):
                for name, limit in re.findall(r"\b(rbps|riops)=(\d+)", values):
                    yield disk, name, float(limit)
            continue
        for name, file in (("rbps", "read_bps_device"), ("riops", "read_iops_device")):
            for disk, limit in re.findall(r"^(\d+:\d+)\s+(\d+)$", _text(folder / f"blkio.throttle.{file}"), re.M):
                yield disk, name, float(limit)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
