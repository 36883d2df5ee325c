"""The run directory: made where it can serve, found only while its run lives, and gone without a trace."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from neuronpipe.protocol.channel import Listener, open_context
from neuronpipe.protocol.errors import NotRunning, UserError
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.run_directory import PREFIX, RUN_FILE, RunDirectory, RunFile, SegmentHandle, is_alive, started
from neuronpipe.protocol.version import VERSION


@pytest.fixture(autouse=True)
def base(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    base = tmp_path_factory.mktemp("b")  # short: paths of sockets in it are limited
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    return base


def run_file(directory: RunDirectory, pid: int | None = None, ticks: int | None = None) -> RunFile:
    pid = os.getpid() if pid is None else pid
    return RunFile(
        protocol=VERSION,
        run="0a1b",
        supervisor_pid=pid,
        supervisor_started=started(pid) if ticks is None else ticks,
        endpoints=directory.endpoints(),
        segments={"kv": SegmentHandle(fd=5, total_bytes=8192)},
        plan="p",
    )


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_only_its_user_can_enter_it_and_read_the_file() -> None:
    directory = RunDirectory.create()
    directory.publish(run_file(directory), "{}")
    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert (directory.path / RUN_FILE).stat().st_mode & 0o777 == 0o600


def test_the_doorbell_rings_whoever_listens_and_never_makes_its_opener_wait() -> None:
    directory = RunDirectory.create()
    worker, loader = (os.open(directory.doorbell, os.O_RDWR | os.O_NONBLOCK) for _ in range(2))
    os.write(worker, b"\0")
    assert os.read(loader, 8) == b"\0"
    os.close(loader)
    os.write(worker, b"\0")  # kept while anybody has it open: the next loader finds it
    assert os.read(worker, 8) == b"\0"
    os.close(worker)
    assert directory.doorbell.stat().st_mode & 0o777 == 0o600


def test_the_run_is_found_and_described() -> None:
    directory = RunDirectory.create()
    directory.publish(run_file(directory), "{}")
    for place in (None, directory.path):
        found, content = RunDirectory.find(place)
        assert found.path == directory.path
        assert content == run_file(directory)
    assert directory.endpoint(CONTROL) == f"ipc://{directory.path}/control"


def test_nothing_is_left_after_removal(base: Path) -> None:
    directory = RunDirectory.create()
    directory.publish(run_file(directory), "{}")
    (directory.path / "logs").mkdir()
    (directory.path / "logs" / "decode-0.log").write_text("x")
    (directory.path / "link").symlink_to(base.parent, target_is_directory=True)
    directory.remove()
    directory.remove()
    assert list(base.iterdir()) == []
    assert base.parent.exists()


def test_without_a_run_there_is_nothing_to_find(base: Path) -> None:
    with pytest.raises(NotRunning, match="start one with `neuronpipe up`") as caught:
        RunDirectory.find()
    assert caught.value.exit_code == 3
    with pytest.raises(NotRunning, match="no run here"):
        RunDirectory.find(base / "nowhere")


def test_a_run_whose_supervisor_has_ended_is_not_running() -> None:
    directory = RunDirectory.create()
    directory.publish(run_file(directory, pid=ended_process(), ticks=1), "{}")
    with pytest.raises(NotRunning, match="has ended"):
        RunDirectory.find(directory.path)
    with pytest.raises(NotRunning):
        RunDirectory.find()


def test_another_process_under_the_same_id_is_not_the_supervisor() -> None:
    directory = RunDirectory.create()
    directory.publish(run_file(directory, ticks=started(os.getpid()) - 1), "{}")
    with pytest.raises(NotRunning):
        directory.read()


def test_a_process_that_was_not_waited_for_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    ticks = started(process.pid)
    assert process.stdout is not None
    process.stdout.read()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(process.pid, ticks)
    process.communicate()


def test_several_live_runs_must_be_told_apart() -> None:
    for _ in range(2):
        directory = RunDirectory.create()
        directory.publish(run_file(directory), "{}")
    with pytest.raises(UserError, match="several runs are live, name one with --run"):
        RunDirectory.find()


def test_a_place_too_long_for_a_socket_is_refused_before_anything_is_made(base: Path) -> None:
    with pytest.raises(UserError, match="the system allows 107; name a shorter place"):
        RunDirectory.create(base / ("x" * 107))
    assert list(base.iterdir()) == []


def test_the_longest_place_that_is_taken_can_be_bound(base: Path) -> None:
    longest = 107 - len("/control")
    path = Path("/tmp") / ("np-" + "x" * (longest - len("/tmp/np-")))
    directory = RunDirectory.create(path)
    try:
        assert len(f"{directory.path}/control") == 107
        with open_context() as context:
            Listener(context, CONTROL, directory.endpoint(CONTROL))
        with pytest.raises(UserError, match="too long"):
            RunDirectory.create(Path(f"{path}x"))
    finally:
        directory.remove()


def test_a_place_that_cannot_be_written_is_a_persons_error(base: Path) -> None:
    (base / "file").write_text("")
    for place in (base / "file" / "run", Path("/proc/neuronpipe"), base / "a" / "b"):
        with pytest.raises(UserError, match="cannot make the run directory"):
            RunDirectory.create(place)
    with pytest.raises(UserError, match="not a directory of yours"):
        RunDirectory.create(base / "file")


def test_a_folder_with_other_things_in_it_is_left_alone(base: Path) -> None:
    (base / "letter").write_text("dear")
    with pytest.raises(UserError, match="not empty and no run directory"):
        RunDirectory.create(base)
    assert (base / "letter").read_text() == "dear"


def test_the_place_of_a_dead_run_is_taken_over_and_that_of_a_live_one_is_not(base: Path) -> None:
    place = base / "run"
    directory = RunDirectory.create(place)
    (place / "control").write_text("a stale socket")
    directory.publish(run_file(directory, pid=ended_process(), ticks=1), "{}")
    again = RunDirectory.create(place)
    assert list(place.iterdir()) == [again.doorbell]
    again.publish(run_file(again), "{}")
    with pytest.raises(UserError, match="run 0a1b is live here"):
        RunDirectory.create(place)


def test_a_new_run_sweeps_away_what_dead_ones_left_and_nothing_else(base: Path) -> None:
    dead, live, starting = (RunDirectory.create() for _ in range(3))
    dead.publish(run_file(dead, pid=ended_process(), ticks=1), "{}")
    live.publish(run_file(live), "{}")
    new = RunDirectory.create()
    assert set(base.iterdir()) == {live.path, starting.path, new.path}


def test_a_sweep_does_not_follow_a_link_to_what_a_dead_run_might_have_left(base: Path, tmp_path: Path) -> None:
    elsewhere = RunDirectory.create(tmp_path / "elsewhere")
    elsewhere.publish(run_file(elsewhere, pid=ended_process(), ticks=1), "{}")
    link = base / f"{PREFIX}link"
    link.symlink_to(elsewhere.path, target_is_directory=True)
    RunDirectory.create()
    RunDirectory(link).remove()
    assert link.is_symlink()
    assert (elsewhere.path / RUN_FILE).exists()


def test_a_directory_of_another_user_is_neither_swept_nor_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = RunDirectory.create()
    dead.publish(run_file(dead, pid=ended_process(), ticks=1), "{}")
    real = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: real + 1)
    dead.remove()
    assert (dead.path / RUN_FILE).exists()


def test_a_file_that_vanishes_during_a_sweep_condemns_nobody(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starting = RunDirectory.create()
    (starting.path / "control").write_text("a socket")
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter([starting.path / RUN_FILE]))
    RunDirectory.create()
    assert (starting.path / "control").exists()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "no JSON"),
        ("[]", "RunFile: expected map"),
        ('{"protocol": "1.0"}', "RunFile.run: missing"),
        ('{"protocol": "2.0"}', "2.0 is not 1"),
    ],
)
def test_a_damaged_or_foreign_file_is_a_persons_error(content: str, complaint: str) -> None:
    directory = RunDirectory.create()
    (directory.path / RUN_FILE).write_text(content)
    with pytest.raises(UserError, match=complaint):
        directory.read()


def test_a_wrong_field_is_named() -> None:
    directory = RunDirectory.create()
    directory.publish(run_file(directory), "{}")
    content = json.loads((directory.path / RUN_FILE).read_text())
    content["segments"]["kv"]["fd"] = "5"
    (directory.path / RUN_FILE).write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"RunFile.segments\['kv'\].fd: expected int"):
        directory.read()


def test_the_first_folder_that_exists_is_the_base(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    monkeypatch.setenv("TMPDIR", "relative")
    monkeypatch.setenv("PREFIX", str(base))
    (base / "tmp").mkdir()
    assert RunDirectory.create().path.parent == base / "tmp"
