"""When a run measures its device by itself: only while it is idle, never in the way of a request, never for nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from array import array
from pathlib import Path

import pytest
from neuronpipe.launch.profile import idle_measurement
from neuronpipe.launch.profile.idle_measurement import DONE, FAILED, measure_if_due
from neuronpipe.launch.supervisor import idle_profile
from neuronpipe.launch.supervisor.idle_profile import IDLE_S, LATER, MAX_TRIES, IdleProfile, MeasuringProcess
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.measure import probe
from neuronpipe.plans.measure.cached_profile import read_profile
from neuronpipe.protocol.layouts.run import PROFILE_STATES

from tests.pipeline import eventually
from tests.unit.test_device_profile import profile

PID = 4711


class PlayedProcess:
    """Counts the processes that were started and ended."""

    def __init__(self, *, fails: bool = False) -> None:
        self.started = self.stopped = self.cleared = 0
        self._fails = fails

    def start(self) -> int:
        if self._fails:
            raise OSError("no more processes")
        self.started += 1
        return PID

    def stop(self, pid: int) -> None:
        assert pid == PID
        self.stopped += 1

    def clear(self) -> None:
        self.cleared += 1


class Run:
    """A schedule with its board, at a time that the test sets."""

    def __init__(self, played: PlayedProcess | None) -> None:
        self.requests, self._state = array("I", [0]), array("I", [0])
        self.played, self.is_warm = played, True
        self.idle = IdleProfile(memoryview(self.requests), memoryview(self._state), lambda: self.is_warm, played, 0.0)

    @property
    def state(self) -> str:
        return PROFILE_STATES[self._state[0]]

    def request(self, now: float) -> None:
        self.requests[0] += 1
        self.idle.look(now)


@pytest.fixture
def run() -> Run:
    return Run(PlayedProcess())


def counts(run: Run) -> tuple[int, int]:
    assert run.played is not None
    return run.played.started, run.played.stopped


def test_a_run_that_nobody_uses_for_a_minute_is_measured_once(run: Run) -> None:
    run.idle.look(IDLE_S - 1)
    assert (run.state, counts(run), run.idle.due_at) == ("waiting", (0, 0), IDLE_S)
    run.idle.look(IDLE_S)
    assert (run.state, counts(run)) == ("measuring", (1, 0))
    run.idle.look(10 * IDLE_S)
    assert run.idle.process_ended(PID, DONE, 100.0)
    run.idle.look(1000 * IDLE_S)
    assert (run.state, counts(run), run.idle.due_at) == ("measured", (1, 0), float("inf"))
    assert run.played is not None
    assert run.played.cleared == 1


def test_a_request_puts_the_measurement_off(run: Run) -> None:
    run.request(IDLE_S - 1)
    run.idle.look(IDLE_S)
    assert counts(run) == (0, 0)
    run.idle.look(2 * IDLE_S - 1)
    assert counts(run) == (1, 0)


def test_a_request_ends_the_measurement_and_the_next_waits_for_twice_as_long(run: Run) -> None:
    run.idle.look(IDLE_S)
    run.request(70.0)
    assert (run.state, counts(run), run.idle.due_at) == ("waiting", (1, 1), 70.0 + 2 * IDLE_S)
    assert not run.idle.process_ended(PID, -signal.SIGKILL, 71.0)  # the killed process is nobody's
    run.idle.look(70.0 + 2 * IDLE_S)
    assert (run.state, counts(run)) == ("measuring", (2, 1))


def test_a_wake_up_without_a_request_does_not_end_the_measurement(run: Run) -> None:
    """`status` wakes the supervisor as well, and would never see a measurement."""
    run.idle.look(IDLE_S)
    run.idle.look(IDLE_S + 1)
    assert (run.state, counts(run)) == ("measuring", (1, 0))


def test_a_busy_machine_is_tried_later_and_not_for_ever(run: Run) -> None:
    now = 0.0
    for _ in range(MAX_TRIES):
        waited_from, now = now, run.idle.due_at
        assert now >= waited_from + IDLE_S
        run.idle.look(now)
        assert run.idle.process_ended(PID, LATER, now)
    assert run.state == "failed"
    run.idle.look(now + 1e6)
    assert counts(run) == (MAX_TRIES, 0)


def test_it_waits_until_memory_is_warm(run: Run) -> None:
    run.is_warm = False
    run.idle.look(IDLE_S)
    assert counts(run) == (0, 0)
    run.is_warm = True
    run.idle.look(2 * IDLE_S)
    assert counts(run) == (1, 0)


@pytest.mark.parametrize("code", [FAILED, -signal.SIGSEGV])
def test_a_failure_is_shown_and_not_repeated(run: Run, code: int) -> None:
    run.idle.look(IDLE_S)
    run.idle.process_ended(PID, code, 70.0)
    run.idle.look(1e6)
    assert (run.state, counts(run)) == ("failed", (1, 0))


def test_a_process_that_cannot_be_started_is_a_failure() -> None:
    run = Run(PlayedProcess(fails=True))
    run.idle.look(IDLE_S)
    assert run.state == "failed"
    assert not run.idle.is_measuring


def test_a_run_that_opted_out_has_no_timer() -> None:
    run = Run(None)
    assert (run.state, run.idle.due_at) == ("", float("inf"))
    run.request(IDLE_S)
    run.idle.look(1e9)
    run.idle.end()
    assert (run.state, run.idle.due_at) == ("", float("inf"))


def test_the_end_of_a_run_ends_its_measurement(run: Run) -> None:
    run.idle.look(IDLE_S)
    run.idle.end()
    run.idle.end()
    assert counts(run) == (1, 1)


GRANDCHILDREN = """
import os, subprocess, sys, tempfile, time
folder = tempfile.mkdtemp()
children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=new)
            for new in (False, True)]
with open(sys.argv[1] + "/pids", "w") as file:
    file.write(" ".join(str(pid) for pid in (os.getpid(), *(child.pid for child in children))) + f" {folder}")
time.sleep(600)
"""


def test_all_that_a_measurement_started_is_killed_and_its_files_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts a run, whose processes are in sessions of their own."""
    script = tmp_path / "measures_slowly.py"
    script.write_text(GRANDCHILDREN)
    monkeypatch.setattr(idle_profile, "MODULE", script.stem)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    measuring = MeasuringProcess(tmp_path, tmp_path)
    pid = measuring.start()
    pids_file = tmp_path / "pids"
    assert eventually(lambda: pids_file.exists() and len(pids_file.read_text().split()) == 4)
    *pids, folder = pids_file.read_text().split()
    assert Path(folder).is_dir()
    measuring.stop(pid)
    os.waitpid(pid, 0)
    assert eventually(lambda: not any(is_live(int(child)) for child in pids))
    assert not Path(folder).parent.exists()


def is_live(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# ---- the process that measures ---------------------------------------------------------------------------------------
@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(idle_measurement, "is_quiet", lambda: True)
    monkeypatch.setattr(idle_measurement, "MIN_AVAILABLE_BYTES", 0)
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "bundles.bin").write_bytes(os.urandom(2 << 20))
    return folder


class PlayedMeasurement:
    def __init__(self, **changes: object) -> None:
        self.calls, self._changes = 0, changes

    def __call__(self, directory: Path, device: Device, accelerator: str | None) -> DeviceProfile:
        self.calls += 1
        return profile(**{"device_id": device.id, "taken_at": time.time(), **self._changes})


def test_what_is_measured_while_idle_is_used_by_the_next_start_and_measured_once(package: Path) -> None:
    measure = PlayedMeasurement()
    assert measure_if_due(package, measure) == measure_if_due(package, measure) == DONE
    assert measure.calls == 1
    assert probe.has_device_profile(package)


def test_a_doubtful_measurement_is_not_kept(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure_if_due(package, PlayedMeasurement(busy=0.5)) == LATER == idle_measurement.LATER
    assert not probe.profile_path(probe.this_device(), package).exists()
    assert "other programs kept the machine 50% busy" in capsys.readouterr().err


def test_a_busy_machine_or_little_memory_is_no_time_to_measure(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = PlayedMeasurement()
    monkeypatch.setattr(idle_measurement, "is_quiet", lambda: False)
    assert measure_if_due(package, measure) == LATER
    monkeypatch.setattr(idle_measurement, "is_quiet", lambda: True)
    monkeypatch.setattr(idle_measurement, "MIN_AVAILABLE_BYTES", 1 << 60)
    assert measure_if_due(package, measure) == LATER
    assert measure.calls == 0


def test_two_runs_do_not_measure_at_the_same_time(package: Path) -> None:
    inner: list[int] = []

    def measure(directory: Path, device: Device, accelerator: str | None) -> DeviceProfile:
        inner.append(measure_if_due(package, PlayedMeasurement()))
        return PlayedMeasurement()(directory, device, accelerator)

    assert measure_if_due(package, measure) == DONE
    assert inner == [LATER]


def test_a_profile_without_runs_is_measured_over(package: Path) -> None:
    """Little memory leaves the steps out, and the plan would go on assuming them."""
    measure_if_due(package, PlayedMeasurement(steps=()))
    assert measure_if_due(package, PlayedMeasurement()) == DONE
    assert read_profile(probe.profile_path(probe.this_device(), package)).steps


def test_the_process_has_the_lowest_priority() -> None:
    code = (
        "import os; from neuronpipe.launch.profile.idle_measurement import lower_priority; lower_priority(); "
        "print(os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0) == os.SCHED_IDLE)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["19", "True"]
