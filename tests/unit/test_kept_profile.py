"""What starts make of a device profile that is kept: when they use it, and what becomes of a new one."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.launch.bench.planned import beaten, flash_beaten
from neuronpipe.launch.cli import main
from neuronpipe.launch.doctor.facts import MEASURE, Fact, known_facts, render_facts
from neuronpipe.plans.device.device import FlashCurve, FlashPoint
from neuronpipe.plans.device.process_limits import Memory
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.device.storage import Storage
from neuronpipe.plans.measure import probe
from neuronpipe.plans.measure.cached_profile import cache_profile, usable_profile
from neuronpipe.plans.measure.profile_confirmation import faster_curve
from neuronpipe.plans.planner.device_facts import device_facts

from tests.unit.test_device_profile import DAY_S, GIB, KIB, changed, figure, profile


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "bundles.bin").write_bytes(os.urandom(2 << 20))
    return folder


def kept(package: Path, **changes: Any) -> Path:
    """This device's profile, kept as of now."""
    device = probe.this_device()
    path = probe.profile_path(device, package)
    path.unlink(missing_ok=True)
    assert cache_profile(path, profile(**{"device_id": device.id, "taken_at": time.time() - 60} | changes)) is None
    return path


def test_a_start_uses_the_profile_instead_of_its_brief_probe(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(package)
    for name in ("measure_curve", "measure_memory"):
        monkeypatch.setattr(probe, name, lambda *_, **__: pytest.fail("measured"))
    device = probe.probe(package)
    assert device.profile is not None
    assert device.flash is not None
    assert {(p.request_bytes, p.depth, p.bytes_per_s) for p in device.flash.points} == {
        (4 * KIB, 1, 50e6),
        (16 * KIB, 1, 200e6),
        (4 * KIB, 32, 400e6),
        (16 * KIB, 32, 800e6),
    }
    assert device.memory_speed is not None
    assert device.memory_speed.sequential_bytes_per_s == pytest.approx(20e9)
    assert device.memory_speed.piece_bytes_per_s(2304) == pytest.approx(9e9)
    assert device_facts(device).profile == device.profile
    assert device.id == probe.this_device().id


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"taken_at": time.time() - 31 * DAY_S}, "it is 31 days old"),
        ({"taken_at": time.time() + DAY_S}, "its date lies ahead"),
        ({"busy": 0.5}, None),  # was said when it was measured
        ({"device_id": "another"}, "field 'device_id': 'another' is another device"),
        ({"dram": ()}, None),
    ],
)
def test_a_profile_that_does_not_hold_leaves_starts_to_their_brief_probe(
    package: Path, changes: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(package, **changes)
    lines: list[str] = []
    device = probe.probe(package, say=lines.append)
    assert device.profile is not None
    assert bool(device.profile.steps) == ("dram" in changes)  # that one lacks memory, and has all else
    assert device.memory_speed is not None
    assert device.memory_speed.sequential_bytes_per_s != pytest.approx(20e9)
    assert [said in line for line in lines] == [True] if said else lines == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ('{"version": 99}', "field 'version': 99"),
        (changed(version=4).decode(), "field 'version': 4, but this program reads 9; measure again"),
        (changed(busy=7).decode(), "busy 7.0 is outside"),
    ],
)
def test_a_damaged_profile_is_passed_over_and_said_with_what_to_do(package: Path, text: str, said: str) -> None:
    path = kept(package)
    path.write_text(text)
    lines: list[str] = []
    found = probe.probe(package, say=lines.append).profile
    assert found is not None
    assert found.steps == ()  # measured at this start
    (line,) = lines
    assert str(path) in line
    assert said in line
    assert line.count("`neuronpipe profile device`") == 1


def test_a_busy_measurement_does_not_replace_one_beyond_doubt(package: Path) -> None:
    path = kept(package)
    busy = profile(device_id=probe.this_device().id, taken_at=time.time(), busy=0.6)
    assert "60% busy" in str(cache_profile(path, busy))
    assert usable_profile(path, busy.device_id, (2, "big"), print) is not None
    assert cache_profile(path, dataclasses.replace(busy, busy=0.01)) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"decode_workers": 1}, "1 decode workers"), ({"decode": (), "dram": ()}, "kernels and memory")],
)
def test_a_profile_measured_within_limits_does_not_replace_a_fuller_one(
    package: Path, changes: dict[str, Any], why: str
) -> None:
    path = kept(package)
    limited = profile(device_id=probe.this_device().id, taken_at=time.time(), **changes)
    assert why in str(cache_profile(path, limited))
    assert cache_profile(path.with_name("another"), limited) is None


def test_a_profile_of_fewer_cores_is_not_used_for_more(package: Path) -> None:
    path, said = kept(package), list[str]()
    assert usable_profile(path, probe.this_device().id, (3, "big"), said.append) is None
    assert usable_profile(path, probe.this_device().id, (2, "little"), said.append) is None
    assert "with 2 decode workers, and 3 may run here" in said[0]
    assert "on big cores, and little ones are allowed here" in said[1]


def limited(patch: pytest.MonkeyPatch, **facts: Any) -> None:
    """From now on this machine is seen from inside a container with these limits."""
    patch.setattr(probe, "read_memory", lambda _: Memory(total_bytes=GIB, available_bytes=GIB // 2))
    patch.setattr(probe, "read_cpu_quota", lambda _: 1.0)
    patch.setattr(os, "sched_getaffinity", lambda _: {0})
    patch.setattr(probe, "io_uring_allowed", lambda _: facts["io_uring"])


def test_the_profile_is_found_inside_a_container_with_limits(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit was part of the device's id, so that whoever used one was planned by the rules."""
    io_uring = probe.this_device().io_uring
    kept(package)
    limited(monkeypatch, io_uring=io_uring)
    for name in ("measure_curve", "measure_memory"):
        monkeypatch.setattr(probe, name, lambda *_, **__: pytest.fail("measured"))
    device = probe.probe(package)
    assert device.profile is not None
    assert device.memory_total_bytes == GIB
    assert device_facts(device).memory_bytes < GIB // 2  # the limit counts for the plan
    assert len([one for one in device_facts(device).processes if one.role == "decode"]) == 1


def test_a_profile_is_found_under_a_limit_of_the_disk_and_capped_by_it(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(package)
    monkeypatch.setattr(probe, "read_storage", lambda *_: Storage(read_bytes_per_s=60e6))
    for name in ("measure_curve", "measure_memory"):
        monkeypatch.setattr(probe, name, lambda *_, **__: pytest.fail("measured"))
    device = probe.probe(package)
    assert device.flash is not None
    assert max(point.bytes_per_s for point in device.flash.points) == 60e6
    assert device.storage == Storage(read_bytes_per_s=60e6)


def test_what_is_measured_under_a_limit_of_the_disk_is_not_used_without_it(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as within:
        within.setattr(probe, "read_storage", lambda *_: Storage(reads_per_s=100.0))
        path = kept(package)
    assert path.exists()
    assert probe.cache_state(package).profile is None


def test_another_release_of_the_kernel_is_measured_anew(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, path = probe.this_device(), kept(package)
    assert path == probe.profile_path(device, package)
    release = os.uname()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result((*release[:2], "9.9.9", *release[3:])))
    assert probe.this_device().id == device.id  # plans stay valid
    assert probe.profile_path(device, package) != path
    assert probe.cache_state(package).profile is None


def test_a_profile_of_another_flash_engine_serves_without_its_flash(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker forbids io_uring unless told otherwise."""
    device = probe.this_device()
    kept(package)
    limited(monkeypatch, io_uring=not device.io_uring)
    measured = FlashCurve(
        engine="threads", direct=True, points=(FlashPoint(request_bytes=4096, depth=1, bytes_per_s=1e6),)
    )
    monkeypatch.setattr(probe, "measure_curve", lambda *_, **__: measured)
    found = probe.probe(package)
    assert found.profile is not None
    assert found.profile.flash is None
    assert found.flash is not None
    assert found.flash.points == measured.points


def test_diff_without_anything_kept_says_what_to_do(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tmp_path / "before.json"
    before.write_text(profile().to_json())
    assert main(["profile", "diff", str(before), str(package)]) == 2
    assert "there is no stored profile of this device" in capsys.readouterr().err
    kept(package)
    assert main(["profile", "diff", str(before), str(package), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same_device"] is False


# ---- what a profile is checked by -------------------------------------------------------------------------------
def brief(speed: float, **changes: Any) -> DeviceProfile:
    """What a start measures, where memory and kernels are so many times as fast as in the profile."""

    def faster(points: tuple[Any, ...], name: str) -> tuple[Any, ...]:
        return tuple(
            dataclasses.replace(point, **{name: figure(speed * getattr(point, name).median)}) for point in points
        )

    one = profile()
    speeds = {"dram": faster(one.dram, "bytes_per_s"), "decode": faster(one.decode, "bytes_per_s")}
    return profile(flash=None, steps=(), taken_at=time.time(), **speeds, **changes)


def started(package: Path, patch: pytest.MonkeyPatch, found: DeviceProfile, *, quiet: bool = True) -> DeviceProfile:
    """The profile that a start goes by, an hour after a device profile was kept."""
    kept(package, taken_at=time.time() - 3600)
    patch.setattr(probe, "measure_memory", lambda *_, **__: found)
    patch.setattr(probe, "measure_curve", lambda *_, **__: None)
    patch.setattr("neuronpipe.plans.measure.cached_profile.is_quiet", lambda: quiet)
    used = probe.probe(package).profile
    assert used is not None
    return used


def test_figures_of_a_quiet_start_replace_slower_ones_of_a_profile(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile of a busy minute, which looked quiet, planned prompts at a third of their speed for good."""
    used = started(package, monkeypatch, brief(2.0))
    assert used.dram_bytes_per_s(2) == pytest.approx(2 * profile().dram_bytes_per_s(2))
    assert used.steps == profile().steps  # which a start does not measure
    monkeypatch.setattr(probe, "measure_memory", lambda *_, **__: pytest.fail("measured twice"))
    again = probe.probe(package).profile
    assert again is not None
    assert again.dram == used.dram


@pytest.mark.parametrize(("speed", "spread", "is_later"), [(0.5, 1.0, False), (1.05, 0.05, False), (2.0, 1.0, True)])
def test_a_disk_that_has_changed_since_is_as_uncertain_as_it_changed(
    speed: float, spread: float, is_later: bool
) -> None:
    curve = profile().flash_curve()
    assert curve is not None
    assert curve.spread == 0.01  # of flash alone
    points = (dataclasses.replace(point, bytes_per_s=speed * point.bytes_per_s) for point in curve.points)
    later = dataclasses.replace(curve, points=tuple(points))
    chosen = faster_curve(curve, later)
    assert chosen is not None
    assert chosen.points == (later if is_later else curve).points
    assert chosen.spread == pytest.approx(spread)
    assert faster_curve(curve, None) == faster_curve(None, curve) == curve


@pytest.mark.parametrize(("speed", "quiet"), [(0.5, True), (1.1, True), (2.0, False)])
def test_a_profile_stays_where_a_start_finds_nothing_better_or_is_no_time_to_look(
    package: Path, monkeypatch: pytest.MonkeyPatch, speed: float, quiet: bool
) -> None:
    assert started(package, monkeypatch, brief(speed), quiet=quiet).dram == profile().dram


def facts_by_name(package: Path) -> dict[str, Fact]:
    return {fact.name: fact for fact in known_facts(probe.cache_state(package), time.time())}


def test_the_doctor_knows_the_facts_of_a_profile_with_date_spread_and_sureness(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(package, monkeypatch, brief(2.0, busy=0.3))
    facts = facts_by_name(package)
    memory = facts["memory"]
    assert (memory.effort, memory.sureness, memory.advice) == ("full", "sure", "")
    assert memory.value == "20.0 GB/s by 2 workers"
    assert memory.spread == 0.01
    assert memory.taken_at == pytest.approx(time.time() - 3600, abs=3600)
    assert "exact" in facts["steps"].value
    assert facts["reads"].sureness == "assumed"  # this profile has no delays
    assert {"memory", "kernels", "flash", "steps"} <= {name for name, fact in facts.items() if fact.effort == "full"}


def test_the_doctor_says_why_a_profile_is_not_used_and_what_is_known_without_it(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(package, monkeypatch, brief(1.0))
    kept(package, busy=0.5)
    facts = facts_by_name(package)
    assert (facts["steps"].sureness, facts["steps"].taken_at) == ("assumed", None)
    assert "is not used: other programs kept the machine 50% busy" in facts["steps"].why
    assert "`neuronpipe profile device PACKAGE`" in facts["steps"].advice
    text = render_facts(facts.values())
    assert text.count(MEASURE) == 1  # though several facts need it
    assert all(f" {name} " in text for name in facts)


def test_the_doctor_doubts_a_brief_measurement_of_a_busy_machine(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "measure_memory", lambda *_, **__: brief(1.0, busy=0.3))
    probe.probe(package)
    memory = facts_by_name(package)["memory"]
    assert (memory.effort, memory.sureness) == ("brief", "doubtful")
    assert "other programs kept the machine 30% busy; measured again at the next start" in memory.why
    assert memory.advice


def test_a_run_that_beats_a_figure_has_it_measured_again(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"test": "tg128", "dram_limit_fraction": 1.58, "error": {}, "flash_bytes_per_token": 0.0}
    why = beaten([row])
    assert why == "tg128 read memory at 158% of the speed that was measured"
    assert beaten([row | {"dram_limit_fraction": 0.9}]) is None
    assert "1.5 times as fast" in str(beaten([row | {"dram_limit_fraction": None, "error": {"tokens_per_s": -1 / 3}}]))
    monkeypatch.setattr(probe, "measure_memory", lambda *_, **__: brief(1.0))
    lines: list[str] = []
    probe.remeasure_memory(package, why, lines.append)
    monkeypatch.setattr(probe, "measure_memory", lambda *_, **__: brief(2.0))
    probe.remeasure_memory(package, why, lines.append)
    assert "since tg128 read memory at 158% of the speed that was measured: 40.0 GB/s instead of 20.0 GB/s" in lines[1]


def test_a_run_that_reads_faster_than_flash_was_measured_has_it_measured_again(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk was slow for a second, steadily: plans expected a fifth of a run's speed until the next month."""
    why = flash_beaten([{"test": "tg128", "flash_limit_fraction": 3.6}])
    assert why == "tg128 read flash at 360% of the speed that was measured"
    assert flash_beaten([{"test": "tg128", "flash_limit_fraction": 0.9}]) is None
    assert flash_beaten([{"test": "tg128", "flash_limit_fraction": None}]) is None
    for bytes_per_s in (1e8, 4e8):
        point = FlashPoint(request_bytes=4096, depth=1, bytes_per_s=bytes_per_s)
        curve = FlashCurve(engine="io_uring", direct=True, points=(point,), spread=0.0)
        monkeypatch.setattr(probe, "measure_curve", lambda *_, curve=curve, **__: curve)
        probe.remeasure_flash(package, why, lambda line: None)
    state = probe.cache_state(package).flash
    assert state is not None
    assert state.measured.points == (point,)
