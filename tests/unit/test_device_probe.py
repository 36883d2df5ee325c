"""The device profile of this very machine, and its flash curve: measured once, kept, and read back."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import os
import time
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.native import ffi, lib
from neuronpipe.plans.device.cores import Core
from neuronpipe.plans.device.device import Device, FlashCurve, FlashPoint
from neuronpipe.plans.measure import flash_reads as flash
from neuronpipe.plans.measure import memory_bandwidth as memory
from neuronpipe.plans.measure.brief_measurement import measure_briefly
from neuronpipe.plans.measure.flash_reads import measure_curve
from neuronpipe.plans.measure.kernel_speed import kernel_cases
from neuronpipe.plans.measure.machine_load import MachineLoad
from neuronpipe.plans.measure.probe import _kernel_cases, file_system, probe, profile_path, this_device
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file to measure; a full measurement of it takes no longer than a brief one. The machine counts as quiet, also
    while other tests run: a doubtful measurement is repeated at the next start."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(MachineLoad, "processor_share", lambda _: 0.0)
    monkeypatch.setattr(MachineLoad, "storage_share", lambda _: 0.0)
    monkeypatch.setattr("neuronpipe.plans.measure.cached_profile.MAX_SPREAD", 10.0)
    monkeypatch.setattr(flash, "FULL_BUDGET_S", 0.05)
    monkeypatch.setattr("neuronpipe.plans.measure.brief_measurement.FULL_REPETITION_S", 0.001)
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "bundles.bin").write_bytes(os.urandom(2 << 20))
    return folder


def test_a_second_probe_reads_the_curve_of_the_first(package: Path) -> None:
    first = probe(package)
    assert first.flash is not None
    assert all(point.bytes_per_s > 0 for point in first.flash.points)
    started = time.perf_counter()
    assert probe(package).flash == first.flash
    assert time.perf_counter() - started < flash.BRIEF_BUDGET_S
    assert probe(package).memory_speed == first.memory_speed


def test_a_full_probe_measures_anew_and_is_kept_for_brief_ones(package: Path) -> None:
    brief, full = probe(package).flash, probe(package, brief=False).flash
    assert brief is not None
    assert full is not None
    assert len(full.points) > len(brief.points)
    assert probe(package).flash == full


@pytest.mark.slow
def test_the_id_is_the_same_on_every_start(package: Path) -> None:
    assert probe(package).id == probe(package, brief=False).id == probe(package.parent).id


def test_a_damaged_cache_is_measured_over(package: Path) -> None:
    probe(package)
    kept = next((package.parent / "cache" / "neuronpipe").glob("flash-*"))
    kept.write_text('{"engine": "io_uring", "direct": true, "points": []}')
    assert probe(package).flash is not None
    assert json.loads(kept.read_text())["measured"]["points"]


def test_a_home_that_cannot_be_written_does_not_stop_a_probe(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert probe(package).flash is not None


@pytest.mark.parametrize("relative", [pytest.param("", marks=pytest.mark.nightly), "cache"])
def test_without_a_home_a_probe_measures_and_keeps_nothing(
    package: Path, monkeypatch: pytest.MonkeyPatch, relative: str
) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", relative)  # a relative one counts as none
    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.chdir(package.parent)
    for brief in (True, False):
        device = probe(package, brief=brief)
        assert device.flash is not None
        assert device.memory_speed is not None
    assert [found.name for found in package.parent.iterdir()] == ["package"]
    with pytest.raises(UserError, match="set XDG_CACHE_HOME to a folder"):
        profile_path(device, package)


def test_a_small_file_says_nothing_about_flash(tmp_path: Path) -> None:
    small = tmp_path / "bundles.bin"
    small.write_bytes(bytes(flash.MIN_FILE_BYTES - 1))
    assert measure_curve(small, brief=True) is None


def test_the_memory_probe_reads_what_it_says_and_refuses_the_rest() -> None:
    words = array("Q", (pow(3, n, 1 << 64) for n in range(8 * 64)))  # 64 pieces of one line
    memory = ffi.from_buffer("uint8_t[]", words)
    seen = ffi.new("uint64_t *")
    assert lib.np_probe_read(memory, 4096, 64, 1, 0, seen) == 4096
    assert seen[0] == functools.reduce(operator.xor, words)
    assert lib.np_probe_read(memory, 4095, 128, 1, 0, seen) == 31 * 128  # a piece that does not fit is left out
    for piece_bytes, every in ((0, 1), (63, 1), (96, 1), (64, 0), (64, 1025)):
        assert lib.np_probe_read(memory, 4096, piece_bytes, every, 0, seen) == 0
    assert lib.np_probe_read(ffi.NULL, 4096, 64, 1, 0, seen) == lib.np_probe_read(memory, 4096, 64, 1, 0, ffi.NULL) == 0


def test_turns_of_the_memory_probe_share_no_piece_so_that_caches_do_not_answer() -> None:
    # Piece n is bit n: the sum of a turn says which pieces it read.
    words = array("Q", (1 << n // 8 if n % 8 == 0 else 0 for n in range(8 * 64)))
    memory, seen, turns = ffi.from_buffer("uint8_t[]", words), ffi.new("uint64_t *"), []
    for turn in range(8):
        assert lib.np_probe_read(memory, 4096, 64, 8, turn, seen) == 8 * 64
        turns.append(int(seen[0]))
    assert all(turn.bit_count() == 8 for turn in turns)
    assert functools.reduce(operator.or_, turns) == (1 << 64) - 1


def test_memory_is_not_measured_where_there_is_little() -> None:
    assert memory.measure_dram([None], 16 * memory.MIN_BYTES - 1, rounds=1, budget_s=0.001) == ()
    little = dataclasses.replace(this_device(), memory_available_bytes=16 * memory.MIN_BYTES - 1)
    assert measure_briefly(little, [None], (), brief=True) is None


def test_a_start_measures_the_kernels_of_its_package_with_one_worker_and_with_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading memory in pieces was taken for computing rows, which is half as fast."""
    monkeypatch.setattr("neuronpipe.plans.measure.brief_measurement.BRIEF_REPETITION_S", 0.001)
    allowed = os.sched_getaffinity(0)
    little = dataclasses.replace(this_device(), memory_available_bytes=16 * memory.MIN_BYTES)
    manifest = Package.open(DEMO).manifest
    found = measure_briefly(little, [min(allowed), None], kernel_cases(manifest), brief=True)
    assert found is not None
    rows: dict[str, Any] = {"quantization": manifest.quantization, "row_weights": manifest.model.width}
    for workers in (1, 2):
        assert found.decode_bytes_per_s("matrix", workers, **rows) > 0
        for kind in ("ups", "downs"):
            assert found.decode_bytes_per_s(kind, workers, 0.1, **rows) > 0
        assert found.panel_token_weights_per_s(512, workers, **rows) > 0
    assert {point.workers for point in found.decode} == {1, 2}
    assert found.steps == ()
    speed = found.memory_speed()
    assert speed is not None
    assert speed.threads == 2
    assert [point.piece_bytes for point in speed.pieces] == list(memory.PIECE_BYTES)
    assert os.sched_getaffinity(0) == allowed


def test_a_brief_curve_tells_large_reads_from_small_ones_at_every_depth_a_plan_may_choose() -> None:
    for depth in {depth for _, depth in flash.BRIEF_POINTS} - {1}:
        assert {4096, 8192, 65536} <= {size for size, of in flash.BRIEF_POINTS if of == depth}


def test_a_size_that_the_file_holds_only_a_few_times_is_not_measured(package: Path) -> None:
    curve = measure_curve(package / "bundles.bin", brief=False)
    assert curve is not None
    assert max(point.request_bytes for point in curve.points) == (2 << 20) // flash.MIN_PLACES


def test_a_file_in_memory_is_said_to_be_read_without_direct_io() -> None:
    """tmpfs takes O_DIRECT since Linux 6.6, and copies from memory: its figures were taken for those of storage."""
    file = os.memfd_create("bundles")
    try:
        os.write(file, bytes(2 << 20))
        curve = measure_curve(Path(f"/proc/self/fd/{file}"), brief=True)
    finally:
        os.close(file)
    assert curve is not None
    assert not curve.direct


def device(**changes: object) -> Device:
    made = Device(
        architecture="aarch64",
        instruction_set="dotprod",
        cores=(Core(id=0, capacity=1024, kind="big"),),
        cpu_quota=None,
        memory_total_bytes=12 << 30,
        memory_available_bytes=6 << 30,
        page_bytes=4096,
        memlock_bytes=65536,
        io_uring=False,
        flash=FlashCurve(
            engine="threads", direct=True, points=(FlashPoint(request_bytes=4096, depth=1, bytes_per_s=5e7),)
        ),
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_available_bytes": 1},
        {"memory_total_bytes": 1 << 30},
        {"memlock_bytes": None},
        {"cpu_quota": 0.5},
        {"cores": (Core(id=0, capacity=1024, kind="big", allowed=False),)},
        {"io_uring": True},
        {"flash": None},
    ],
)
def test_limits_and_rights_do_not_change_the_id(changes: dict[str, object]) -> None:
    assert device(**changes).id == device().id


@pytest.mark.parametrize(
    "changes",
    [
        {"cores": ()},
        {"cores": (Core(id=0, capacity=512, kind="little"),)},
        {"processor": "another"},
        {"instruction_set": "neon"},
        {"page_bytes": 16384},
    ],
)
def test_other_hardware_makes_another_device(changes: dict[str, object]) -> None:
    assert device(**changes).id != device().id


def mount_line(directory: Path, kind: str, source: str) -> str:
    number = os.stat(directory).st_dev
    return f"22 1 {os.major(number)}:{os.minor(number)} / / rw shared:1 - {kind} {source} rw\n"


def test_storage_is_named_by_its_file_system_and_not_by_the_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "mountinfo"

    def named(kind: str, fsid: int, blocks: int, source: str = "none") -> str:
        table.write_text("1 1 0:0 / / rw - proc proc rw\n" + mount_line(tmp_path, kind, source))
        system = SimpleNamespace(f_fsid=fsid, f_blocks=blocks, f_frsize=4096)
        monkeypatch.setattr(os, "statvfs", lambda _: system)
        return file_system(tmp_path, table)

    assert named("ext4", 7, 100, "/dev/sda1") == named("ext4", 7, 100, "/dev/sdb1")  # a name that the next boot gives
    assert named("ext4", 7, 100) == named("ext4", 7, 50)  # a quota
    assert named("ext4", 7, 100) != named("ext4", 8, 100)
    assert named("overlay", 7, 100) == named("overlay", 8, 100)  # two containers of one host
    assert named("overlay", 7, 100) != named("overlay", 7, 99)
    assert named("nfs", 0, 100, "server:/a") != named("nfs", 0, 100, "server:/b")
    table.unlink()
    assert file_system(tmp_path, table)  # a kernel that shows no mounts


def test_the_curve_is_read_between_and_beyond_its_points() -> None:
    points = [(4096, 1, 100.0), (16384, 1, 400.0), (4096, 32, 1000.0)]
    curve = FlashCurve(
        engine="threads",
        direct=True,
        points=tuple(FlashPoint(request_bytes=size, depth=depth, bytes_per_s=speed) for size, depth, speed in points),
    )
    assert curve.bytes_per_s(8192, 1) == pytest.approx(200.0)
    assert curve.bytes_per_s(1 << 20, 1) == pytest.approx(400.0)
    assert curve.bytes_per_s(4096, 32**0.5) == pytest.approx(100.0 * 10**0.5)  # halfway to 1000, on logarithmic scales
    assert curve.bytes_per_s(512, 64) == pytest.approx(1000.0)


def test_no_kernels_are_measured_for_a_package_that_a_cache_holds() -> None:
    assert _kernel_cases(DEMO) == ()
