"""The storage of a package: its file system, and the limits of control groups, from other machines' /sys and /proc."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from neuronpipe.launch.planning.options import PlanOptions
from neuronpipe.launch.planning.search import Subject, search_plan
from neuronpipe.launch.planning.shapes import no_activity
from neuronpipe.plans.device.storage import Storage, read_storage
from neuronpipe.plans.plan.document import Plan

from tests.unit.test_device_limits import V1, V2, write
from tests.unit.test_held_plan import CURVE, SPEED
from tests.unit.test_speed_range import BRIEF, MODEL, device

SDA2, VOLUME, ANONYMOUS = os.makedev(8, 2), os.makedev(253, 0), os.makedev(0, 45)
MOUNTS = {
    "proc/self/mountinfo": "22 1 8:2 / / rw - ext4 /dev/sda2 rw\n"
    "23 1 253:0 / /data rw - xfs /dev/mapper/data rw\n"
    "24 1 0:45 / /pool rw - btrfs /dev/sda2 rw\n"
    "25 1 0:46 / /mnt rw - nfs4 server:/export rw\n"
    "26 1 0:47 / /layers rw - overlay overlay rw,lowerdir=/a"
}
V2_LIMITS = "8:0 rbps=1048576 wbps=max riops=200 wiops=max\n8:16 rbps=5 wbps=max riops=max wiops=max"


def machine(root: Path, files: dict[str, str]) -> Path:
    """A disk sda with a partition sda2, on which a volume lies, and another disk sdb."""
    devices = root / "sys/devices"
    numbers = {
        "sda/dev": "8:0",
        "sda/sda2/dev": "8:2",
        "sda/sda2/partition": "2",
        "dm-0/dev": "253:0",
        "sdb/dev": "8:16",
    }
    write(root, {**MOUNTS, **{f"sys/devices/{name}": text for name, text in numbers.items()}, **files})
    links = {
        "sys/dev/block/8:2": "sda/sda2", "sys/dev/block/8:0": "sda", "sys/dev/block/253:0": "dm-0",
        "sys/class/block/sda2": "sda/sda2", "sys/devices/dm-0/slaves/sda2": "sda/sda2",
    }  # fmt: skip
    for link, target in links.items():
        (root / link).parent.mkdir(parents=True, exist_ok=True)
        (root / link).symlink_to(devices / target)
    return root


@pytest.mark.parametrize(("device_number", "file_system"), [(SDA2, "ext4"), (VOLUME, "xfs"), (ANONYMOUS, "btrfs")])
def test_a_limit_of_the_disk_below_a_file_system_is_seen(tmp_path: Path, device_number: int, file_system: str) -> None:
    files = {**V2, "sys/fs/cgroup/app/run/io.max": V2_LIMITS, "sys/fs/cgroup/app/io.max": "8:0 rbps=max riops=100"}
    storage = read_storage(machine(tmp_path, files), device_number)
    assert storage == Storage(file_system=file_system, read_bytes_per_s=1048576.0, reads_per_s=100.0)
    assert storage.limits == "1.0 MB/s and 100 reads/s"


def test_limits_of_version_1_are_seen(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "7:blkio:/app\n4:memory:/",
        "sys/fs/cgroup/blkio/app/blkio.throttle.read_bps_device": "8:0 2000000\n8:16 1",
        "sys/fs/cgroup/blkio/app/blkio.throttle.read_iops_device": "8:0 50",
    }
    storage = read_storage(machine(tmp_path, files), SDA2)
    assert (storage.read_bytes_per_s, storage.reads_per_s) == (2e6, 50.0)


def test_where_the_disk_is_unknown_every_limit_counts(tmp_path: Path) -> None:
    """A container's root is an overlay, which does not name its disk."""
    root = machine(tmp_path, {**V2, "sys/fs/cgroup/app/run/io.max": V2_LIMITS})
    assert read_storage(root, os.makedev(0, 47)).read_bytes_per_s == 5.0


@pytest.mark.parametrize(
    "groups", [V1, V2, {}, {"proc/self/cgroup": "0::/app", "sys/fs/cgroup/app/io.max": "8:0 rbps=-"}]
)
def test_without_limits_there_are_none(tmp_path: Path, groups: dict[str, str]) -> None:
    storage = read_storage(machine(tmp_path, groups), SDA2)
    assert storage == Storage(file_system="ext4")
    assert storage.limits == ""
    assert storage.notes() == ()
    assert storage.applied_to(CURVE) == CURVE


def test_a_machine_without_these_files_has_unknown_storage(tmp_path: Path) -> None:
    assert read_storage(tmp_path, SDA2) == Storage()


def test_volumes_that_name_each_other_end(tmp_path: Path) -> None:
    root = machine(tmp_path, {})
    (root / "sys/devices/sda/slaves").mkdir()
    (root / "sys/devices/sda/slaves/dm-0").symlink_to(root / "sys/devices/dm-0")
    assert read_storage(root, VOLUME).file_system == "xfs"


def test_a_limit_caps_the_curve_by_bytes_and_by_reads() -> None:
    curve = Storage(read_bytes_per_s=50e6, reads_per_s=1000.0).applied_to(CURVE)
    for before, after in zip(CURVE.points, curve.points, strict=True):
        assert after.bytes_per_s == min(before.bytes_per_s, 50e6, 1000 * before.request_bytes)
    assert curve.points != CURVE.points
    assert curve.spread == CURVE.spread


def test_a_network_file_system_is_known_and_less_certain(tmp_path: Path) -> None:
    storage = read_storage(machine(tmp_path, {}), os.makedev(0, 46))
    assert storage.is_network
    assert storage.applied_to(CURVE).spread == 0.5
    assert storage.applied_to(CURVE).points == CURVE.points


def test_a_plan_says_what_limits_its_reads_and_expects_less() -> None:
    def planned_on(storage: Storage) -> Plan:
        facts = dataclasses.replace(device((storage.applied_to(CURVE), SPEED, BRIEF)), storage=storage)
        options = PlanOptions(ffn_resident_share=0.3, context_tokens=64, workers=1, mode="exact")
        subject = Subject(manifest=MODEL, read_activity=no_activity, device=facts)
        return search_plan(subject, options, several=False, gateway=False)[2]

    free, slow = planned_on(Storage()), planned_on(Storage(file_system="nfs4", read_bytes_per_s=1e6))
    assert (slow.expected.tokens_per_s or 0) < (free.expected.tokens_per_s or 0)
    assert any("limits reads of the package's disk to 1.0 MB/s" in reason for reason in slow.reasons)
    assert any("network file system (nfs4)" in reason for reason in slow.reasons)
    assert not any("network" in reason or "control group" in reason for reason in free.reasons)
