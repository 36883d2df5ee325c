"""Figures of a device that was measured while it was busy do not stay (4.7 GB/s were kept where the doctor later found
14.4): a doubtful or old measurement is taken again, and said."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from neuronpipe.launch.cli import main
from neuronpipe.launch.doctor.checks import checks
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.device.device import Device, FlashCurve, FlashPoint
from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.device.measured_points import SEQUENTIAL_PIECE_BYTES, DramPoint
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.measure import cached_profile as kept
from neuronpipe.plans.measure import flash_reads as flash
from neuronpipe.plans.measure import probe
from neuronpipe.plans.measure.cached_profile import (
    DAY_S,
    MAX_AGE_DAYS,
    MAX_TRIES,
    RETRY_S,
    CachedMeasurement,
    cache_measurement,
    cached_or_measured,
)
from neuronpipe.plans.measure.machine_load import MachineLoad

from tests.unit.test_device_profile import profile

START = 1.8e9


def curve(
    speed: float, *, busy: float = 0.0, spread: float = 0.0, sizes: tuple[int, ...] = (4096, 65536)
) -> FlashCurve:
    points = tuple(FlashPoint(request_bytes=size, depth=32, bytes_per_s=speed * size / 4096) for size in sizes)
    return FlashCurve(engine="threads", direct=True, points=points, spread=spread, busy=busy)


def memory(speed: float, *, busy: float = 0.0) -> DeviceProfile:
    """What a start measures of memory."""
    points = [(size, workers) for size in (SEQUENTIAL_PIECE_BYTES, 4096) for workers in (1, 2)]
    dram = tuple(
        DramPoint(workers=n, piece_bytes=size, bytes_per_s=Figure(median=speed * n / 2, spread=0.01))
        for size, n in points
    )
    none: dict[str, Any] = dict.fromkeys(("decode", "panels", "reused", "steps", "read_delays", "read_factors"), ())
    return dataclasses.replace(profile(), dram=dram, flash=None, busy=busy, **none)


class Starts:
    """Starts of the program on a device whose flash gives what a test says, at a time that it says."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.file, self.now, self.said, self.measured = folder / "kept" / "flash.json", START, list[str](), 0
        patch.setattr(kept, "time", SimpleNamespace(time=lambda: self.now))

    def start(self, finds: FlashCurve | None, after_s: float = RETRY_S + 1) -> FlashCurve | None:
        """The figures that this start works with."""
        self.now += after_s

        def measure() -> FlashCurve | None:
            self.measured += 1
            return finds

        return cached_or_measured(self.file, "flash", FlashCurve, measure, self.said.append)


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starts:
    return Starts(tmp_path, monkeypatch)


BUSY, APART = curve(1e8, busy=0.5), curve(1e8, spread=0.5)
GOOD, SAME, BETTER, WORSE = curve(1e8), curve(1.1e8), curve(3e8), curve(3e7)


@pytest.mark.parametrize(("first", "why"), [(BUSY, "other programs kept the machine 50% busy"), (APART, "50% apart")])
def test_a_doubtful_measurement_is_taken_again_at_the_next_start_and_said(
    starts: Starts, first: FlashCurve, why: str
) -> None:
    assert starts.start(first) == first
    assert starts.said == []
    assert starts.start(BETTER) == BETTER
    (line,) = starts.said
    assert line.startswith("measured flash again, since ")
    assert why in line
    assert line.endswith("4.8 GB/s instead of 1.6 GB/s")
    assert starts.start(WORSE) == BETTER
    assert starts.measured == 2


def test_a_good_measurement_is_left_alone(starts: Starts) -> None:
    for _ in range(20):
        assert starts.start(GOOD) == GOOD
    assert (starts.measured, starts.said) == (1, [])


def test_the_next_start_on_a_busy_machine_measures_again_and_drops_what_is_worse(starts: Starts) -> None:
    starts.start(BUSY)
    assert starts.start(curve(3e7, busy=0.9)) == BUSY
    assert starts.said[-1].endswith("1.6 GB/s stays (480 MB/s now, but other programs kept the machine 90% busy)")
    assert starts.start(better := curve(3e8, busy=0.4)) == better  # others can only take
    assert starts.start(GOOD) == GOOD  # and yet a quiet machine has the last word
    assert starts.measured == 4


def test_a_machine_that_is_always_busy_is_measured_a_few_times_and_then_daily(starts: Starts) -> None:
    for _ in range(10):
        starts.start(BUSY)
    assert starts.measured == 1 + MAX_TRIES
    starts.start(BUSY, DAY_S)
    assert starts.measured == 2 + MAX_TRIES


def test_starts_in_quick_succession_measure_once(starts: Starts) -> None:
    starts.start(BUSY)
    assert starts.start(GOOD, 1) == BUSY
    assert starts.measured == 1


def test_what_one_start_alone_has_measured_is_confirmed_a_day_later(starts: Starts) -> None:
    starts.start(GOOD)
    assert starts.start(SAME, DAY_S + 1) == GOOD  # the figures, and so the plan, stay
    assert starts.said[-1].endswith("nothing had confirmed it the last time: 1.6 GB/s stays")
    starts.start(SAME, 2 * DAY_S)
    assert starts.measured == 2


@pytest.mark.parametrize(("found", "used"), [(SAME, GOOD), (BETTER, BETTER), (WORSE, WORSE)])
def test_an_old_measurement_is_taken_again(starts: Starts, found: FlashCurve, used: FlashCurve) -> None:
    starts.start(GOOD)
    starts.start(GOOD, DAY_S + 1)
    assert starts.start(found, (MAX_AGE_DAYS + 1) * DAY_S) == used
    assert "31 days old" in starts.said[-1]
    assert starts.measured == 3


def test_a_busy_machine_does_not_undo_an_old_measurement(starts: Starts) -> None:
    starts.start(GOOD)
    assert starts.start(curve(3e7, busy=0.5), DAY_S + 1) == GOOD
    assert starts.start(curve(3e8, busy=0.5), DAY_S + 1) == curve(3e8, busy=0.5)


def test_a_date_that_lies_ahead_is_no_reason_to_keep_figures(starts: Starts) -> None:
    starts.start(GOOD)
    assert starts.start(BETTER, -3 * DAY_S) == BETTER


def test_a_thorough_curve_stays_where_a_brief_one_says_the_same(starts: Starts) -> None:
    full = curve(1e8, sizes=(4096, 65536, 1 << 20))
    cache_measurement(starts.file, full)
    starts.now = START + (MAX_AGE_DAYS + 1) * DAY_S
    assert starts.start(SAME) == full
    assert starts.start(BETTER, (MAX_AGE_DAYS + 1) * DAY_S) == BETTER


def test_the_doctors_measurement_is_kept_unless_it_is_the_doubtful_one(starts: Starts) -> None:
    starts.start(BUSY)
    cache_measurement(starts.file, WORSE)
    assert starts.start(GOOD) == WORSE
    cache_measurement(starts.file, curve(1e7, busy=0.5))
    assert starts.start(GOOD) == WORSE
    assert starts.measured == 1


def test_what_cannot_be_measured_now_stays(starts: Starts) -> None:
    starts.start(BUSY)
    assert starts.start(None) == BUSY


@pytest.mark.parametrize("text", ["", "[]", '{"measured": {}}', '{"measured": 1, "taken_at": "x"}'])
def test_a_damaged_record_is_measured_over(starts: Starts, text: str) -> None:
    starts.file.parent.mkdir()
    starts.file.write_text(text)
    assert starts.start(GOOD) == GOOD
    assert json.loads(starts.file.read_text())["measured"]["points"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("agreed", "2"),
        ("taken_at", float("nan")),
        ("taken_at", True),
        ("unheard_of", 1),
        ("measured.engine", 5),
        ("measured.points", []),
        ("measured.points.0.bytes_per_s", 0),
        ("measured.points.0.bytes_per_s", float("inf")),
        ("measured.points.0.depth", 1.5),
        ("measured.points.0.unheard_of", 1),
    ],
)
def test_a_record_with_one_wrong_field_is_measured_over(starts: Starts, path: str, value: object) -> None:
    assert starts.start(GOOD) == GOOD
    record = json.loads(starts.file.read_text())
    *folders, name = path.split(".")
    place = record
    for folder in folders:
        place = place[int(folder) if folder.isdigit() else folder]
    place[name] = value
    starts.file.write_text(json.dumps(record))
    assert starts.start(BETTER, 0) == BETTER
    assert starts.measured == 2


def test_memory_speeds_are_kept_and_read_back(tmp_path: Path) -> None:
    found = memory(4.7e9)
    cache_measurement(tmp_path / "memory.json", found)
    assert (
        cached_or_measured(tmp_path / "memory.json", "memory", DeviceProfile, lambda: None, lambda line: None) == found
    )


def test_memory_and_flash_are_compared_by_the_figures_that_both_have() -> None:
    record = CachedMeasurement(measured=memory(4.7e9, busy=0.6), taken_at=START)
    assert record.followed_by(memory(14.4e9), START).measured == memory(14.4e9)
    assert kept.best_speed(memory(14.4e9)) == "14.4 GB/s"


# ---- how steady a measurement is ---------------------------------------------------------------------------------


def test_a_flash_point_is_the_median_of_repetitions_that_are_spread_over_time() -> None:
    calls: list[tuple[int, int]] = []

    def measure_point(size: int, depth: int) -> float:
        calls.append((size, depth))
        return 1.0 if len(calls) in (2, 3) else 100.0 * size  # something disturbs two neighbours in time

    points = ((4, 1), (8, 1), (64, 1))
    windows = flash.repeat_points(points, measure_point)
    assert calls[:6] == [*points, *points]
    assert [statistics.median(windows[point]) for point in points] == [400.0, 800.0, 6400.0]


def test_a_point_whose_repetitions_lie_apart_is_measured_until_it_is_steady() -> None:
    drawn: Iterator[float] = iter([100.0, 50.0, 10.0, 96.0, 101.0, 104.0])
    windows = flash.repeat_points(((4, 1), (8, 1)), lambda size, depth: next(drawn) if size == 4 else 200.0)
    assert len(windows[8, 1]) == flash.ROUNDS
    assert statistics.median(windows[4, 1]) == 96.0
    assert list(drawn) == [104.0]


@pytest.mark.parametrize("slower", [(64, 32), (4, 128)])
def test_a_curve_that_falls_with_larger_or_more_reads_is_measured_again(slower: tuple[int, int]) -> None:
    """A plan took 64 KiB as the largest read from such a curve."""
    turns = dict.fromkeys([(4, 32), (64, 32), (4, 128), (64, 128)], 0)

    def measure_point(size: int, depth: int) -> float:
        turns[size, depth] += 1
        disturbed = (size, depth) == slower and turns[slower] <= 2
        return 30.0 if disturbed else 100.0 + size + depth

    windows = flash.repeat_points(tuple(turns), measure_point)
    assert statistics.median(windows[slower]) == 100.0 + sum(slower)
    assert turns[4, 32] > flash.ROUNDS  # either of the two may be the wrong one


# ---- how busy the machine is -------------------------------------------------------------------------------------


def written(root: Path, stat: str, pressure: str = "") -> Path:
    (root / "proc/pressure").mkdir(parents=True, exist_ok=True)
    (root / "proc/stat").write_text(stat)
    (root / "proc/pressure/io").write_text(pressure)
    return root


def test_what_others_and_other_machines_took_counts_as_busy(tmp_path: Path) -> None:
    busy = MachineLoad(written(tmp_path, "cpu  1000 0 1000 8000 0 0 0 0 0 0\n", "some avg10=12.50 avg60=0.00 total=1"))
    written(tmp_path, "cpu  1100 100 1100 8500 50 40 10 100 0 0\n")
    assert busy.processor_share() == pytest.approx(0.4, abs=0.02)
    assert busy.storage_share() == 0.125


@pytest.mark.parametrize("stat", ["", "cpu 1 2 3\n", "intr 1\n", "cpu  1000 0 1000 8000 0 0 0 0 0 0\n"])
def test_what_cannot_be_read_counts_as_quiet(tmp_path: Path, stat: str) -> None:
    busy = MachineLoad(written(tmp_path, stat, "nonsense"))
    assert (busy.processor_share(), busy.storage_share()) == (0.0, 0.0)


def test_what_this_process_takes_itself_is_not_held_against_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    busy = MachineLoad(written(tmp_path, "cpu  1000 0 1000 8000 0 0 0 0 0 0\n"))
    own = os.times()
    used = os.times_result((own.user + 100 / ticks, own.system, own.children_user, own.children_system, 0))
    monkeypatch.setattr(os, "times", lambda: used)
    written(tmp_path, "cpu  1100 0 1000 8100 0 0 0 0 0 0\n")
    assert busy.processor_share() == pytest.approx(0.0, abs=0.02)


# ---- the program -------------------------------------------------------------------------------------------------


class Machine:
    """What measuring this machine gives: a first start's figures, and those of later ones."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.speed, self.busy, hours = memory(4.7e9), 0.8, itertools.count()
        patch.setattr(probe, "measure_memory", lambda *_, **__: dataclasses.replace(self.speed, busy=self.busy))
        patch.setattr(probe, "measure_curve", lambda *_, **__: GOOD)
        patch.setattr(MachineLoad, "processor_share", lambda _: self.busy)
        patch.setattr(MachineLoad, "storage_share", lambda _: 0.0)
        patch.setattr(kept, "time", SimpleNamespace(time=lambda: START + 3600 * next(hours)))

    def grows_quiet(self) -> None:
        self.speed, self.busy = memory(14.4e9), 0.0


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Machine(monkeypatch)


def test_figures_of_a_busy_first_start_do_not_stick(machine: Machine) -> None:
    assert sequential(probe.probe(DEMO)) == pytest.approx(4.7e9)
    machine.grows_quiet()
    said: list[str] = []
    assert sequential(probe.probe(DEMO, say=said.append)) == pytest.approx(14.4e9)
    assert said[1] == (
        "measured memory again, since other programs kept the machine 80% busy the last time: "
        "14.4 GB/s instead of 4.7 GB/s"
    )


def test_a_command_says_so_in_one_line_of_its_errors(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json"]) == 0
    assert capsys.readouterr().err == ""
    machine.grows_quiet()
    assert main(["plan", "--json"]) == 0
    errors = capsys.readouterr().err.splitlines()
    assert "neuronpipe: measured memory again" in errors[1]
    assert main(["plan", "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_the_doctor_doubts_figures_that_it_finds_on_a_busy_machine(machine: Machine) -> None:
    for state in ("warn", "ok"):
        found = {check.name: check for check in checks(DEMO)}
        assert found["flash"].state == found["memory speed"].state == state
        machine.grows_quiet()
    assert sequential(probe.probe(DEMO)) == pytest.approx(14.4e9)


def sequential(device: Device) -> float:
    assert device.memory_speed is not None
    return device.memory_speed.sequential_bytes_per_s
