"""The run directory: made where it can serve, found only while its run lives, and gone without a trace."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from neuronpipe.protocol import layouts, run_directory
from neuronpipe.protocol.channel import Listener, open_context
from neuronpipe.protocol.codec import VERSION
from neuronpipe.protocol.errors import NotRunning, UserError
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.memory.segments import Segment
from neuronpipe.protocol.run_directory import (
    LOCK_FILE,
    PREFIX,
    RUN_FILE,
    RunDirectory,
    RunFile,
    SegmentHandle,
    is_alive,
    own_pid,
    started,
)


@pytest.fixture(autouse=True)
def base(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    base = tmp_path_factory.mktemp("b")  # short: paths of sockets in it are limited
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    monkeypatch.setattr(run_directory, "BOUND_SOCKETS", base / "sockets")  # not those of this machine
    return base


def run_file(directory: RunDirectory, ticks: int | None = None) -> RunFile:
    return RunFile(
        protocol=VERSION,
        run="0a1b",
        supervisor_pid=os.getpid(),
        supervisor_started=started(os.getpid()) if ticks is None else ticks,
        endpoints=directory.endpoints(),
        segments={"kv": SegmentHandle(fd=5, total_bytes=8192, layout="")},
        private={},
        plan="p",
    )


def live_run(path: Path | None = None) -> RunDirectory:
    """A directory whose run lives: this process holds its lock."""
    directory = RunDirectory.create(path)
    directory.publish(run_file(directory), "{}", "{}")
    return directory


def dead_run(path: Path | None = None) -> RunDirectory:
    """What a run that was killed leaves."""
    directory = live_run(path)
    directory.release()
    return directory


def test_only_its_user_can_enter_it_and_read_the_file() -> None:
    directory = RunDirectory.create()
    directory.publish(run_file(directory), "{}", "{}")
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
    directory.publish(run_file(directory), "{}", "{}")
    for place in (None, directory.path):
        found, content = RunDirectory.find(place)
        assert found.path == directory.path
        assert content == run_file(directory)
    assert directory.endpoint(CONTROL) == f"ipc://{directory.path}/control"


def test_nothing_is_left_after_removal(base: Path) -> None:
    directory = RunDirectory.create()
    directory.publish(run_file(directory), "{}", "{}")
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
    directory = dead_run()
    with pytest.raises(NotRunning, match="has ended"):
        RunDirectory.find(directory.path)
    with pytest.raises(NotRunning):
        RunDirectory.find()


def test_a_run_lives_though_another_pid_namespace_shows_its_supervisor_under_no_id_or_anothers() -> None:
    directory = RunDirectory.create()
    directory.publish(run_file(directory, ticks=started(os.getpid()) - 1), "{}", "{}")
    found = directory.read()
    with pytest.raises(UserError, match="is not to be seen from here; do this in the container"):
        found.open_segment("kv")


def test_a_segment_is_opened_of_the_supervisor_that_run_json_names() -> None:
    layout = layouts.board(processes=1, sequences=2)
    with Segment.create(layout) as segment:
        handles = {"board": SegmentHandle(fd=segment.fd, total_bytes=layout.total_bytes, layout=layout.text)}
        file = replace(run_file(RunDirectory.create()), segments=handles)
        with file.open_segment("board") as opened, opened.map() as mapping:
            assert mapping.view("leaving").tolist() == [0]


def test_a_segment_that_run_json_does_not_lay_out_is_refused_by_name() -> None:
    layout = layouts.board(processes=1, sequences=2)
    with Segment.create(layout) as segment:
        handles = {"board": SegmentHandle(fd=segment.fd, total_bytes=layout.total_bytes, layout="leaving u32 1 5000\n")}
        file = replace(run_file(RunDirectory.create()), segments=handles)
        with pytest.raises(UserError, match=r"run\.json: segments\.board\.layout: leaving does not lie"):
            file.open_segment("board")
        with pytest.raises(UserError, match="segment trace: this run has none"):
            file.open_segment("trace")


def test_the_lock_is_held_by_the_last_copy_of_the_process_that_took_it() -> None:
    directory = RunDirectory.create()
    directory.publish(run_file(directory), "{}", "{}")
    read_end, write_end = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    os.close(read_end)
    directory.release()
    assert directory.read()
    with directory.ending(10):
        os.close(write_end)
    with pytest.raises(NotRunning):
        directory.read()
    os.waitpid(supervisor, 0)


def test_a_run_that_does_not_end_is_not_waited_for_without_end() -> None:
    directory = live_run()
    with pytest.raises(UserError, match="does not end; its logs are there"), directory.ending(0.02):
        pass


def test_a_run_that_ends_between_being_found_and_being_ended_is_no_run() -> None:
    directory = live_run()
    directory.remove()
    with pytest.raises(NotRunning, match="the run has ended"), directory.ending(10):
        pass


def test_a_run_of_an_older_version_is_neither_taken_for_dead_nor_for_live(base: Path) -> None:
    older = dead_run()
    (older.path / LOCK_FILE).unlink()
    RunDirectory.create()
    assert (older.path / RUN_FILE).exists()
    with pytest.raises(UserError, match="so nothing shows whether the run lives; if it has ended, remove it"):
        older.read()


def test_this_process_is_known_by_the_id_that_proc_shows() -> None:
    assert own_pid() == os.getpid()
    assert is_alive(own_pid(), started(own_pid()))


def test_a_process_that_was_not_waited_for_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    ticks = started(process.pid)
    assert process.stdout is not None
    process.stdout.read()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(process.pid, ticks)
    process.communicate()


def test_several_live_runs_must_be_told_apart() -> None:
    assert {live_run().path, live_run().path} == {found.path for found, _ in RunDirectory.live()}
    with pytest.raises(UserError, match="several runs are live, name one with --run, as `neuronpipe ps` lists them"):
        RunDirectory.find()


def test_of_many_live_runs_an_error_shows_a_few() -> None:
    for _ in range(5):
        live_run()
    with pytest.raises(UserError, match=r"\) and 2 more$"):
        RunDirectory.find()


def test_a_place_too_long_for_a_socket_is_refused_before_anything_is_made(base: Path) -> None:
    with pytest.raises(UserError, match="the system allows 107; name a shorter place"):
        RunDirectory.create(base / ("x" * 107))
    assert list(base.iterdir()) == []


def test_the_longest_place_that_is_taken_can_be_bound(base: Path) -> None:
    longest = 107 - len("/supervisor")
    path = Path("/tmp") / ("np-" + "x" * (longest - len("/tmp/np-")))
    directory = RunDirectory.create(path)
    try:
        name = f"{directory.path}/supervisor"
        assert len(name) == 107
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as bound:
            bound.bind(name)
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
    dead_run(place)
    (place / "control").write_text("a stale socket")
    (place / "trial").mkdir()
    (place / "trial" / LOCK_FILE).touch()
    again = RunDirectory.create(place)
    assert set(place.iterdir()) == {again.doorbell, place / LOCK_FILE}
    for _ in range(2):  # before and after it can be found
        with pytest.raises(UserError, match="a run is live here"):
            RunDirectory.create(place)
        again.publish(run_file(again), "{}", "{}")


def test_whoever_only_looks_keeps_nobody_from_the_place_of_a_dead_run(base: Path) -> None:
    dead = dead_run(base / "run")
    looking = dead._lock_of_the_dead()
    assert looking is not None
    threading.Timer(0.1, os.close, (looking,)).start()
    assert RunDirectory.create(base / "run").path == dead.path


def test_a_new_run_sweeps_away_what_dead_ones_left_and_nothing_else(base: Path) -> None:
    dead_run()
    RunDirectory.create().release()  # one that was killed before it could be found
    live, starting, elsewhere = live_run(), RunDirectory.create(), base / "elsewhere"
    dead_run(elsewhere)
    new = RunDirectory.create()
    assert set(base.iterdir()) == {live.path, starting.path, elsewhere, new.path}


def test_a_directory_that_is_not_locked_yet_is_not_swept(base: Path) -> None:
    (base / f"{PREFIX}fresh").mkdir()
    RunDirectory.create()
    assert (base / f"{PREFIX}fresh").exists()


def test_a_directory_that_is_swept_while_it_is_being_locked_is_made_again(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep that looks between the making of the lock's file and the lock on it."""
    real, swept = os.open, []

    def opened(path: Path, flags: int, *rest: int, **options: int) -> int:
        descriptor = real(path, flags, *rest, **options)
        if not swept and Path(path).name == LOCK_FILE:
            swept.append(path)
            RunDirectory._sweep(base)
        return descriptor

    monkeypatch.setattr(os, "open", opened)
    directory = RunDirectory.create()
    assert swept
    directory.publish(run_file(directory), "{}", "{}")
    assert directory.read()
    assert list(base.iterdir()) == [directory.path]


def test_a_sweep_does_not_follow_a_link_to_what_a_dead_run_might_have_left(base: Path, tmp_path: Path) -> None:
    elsewhere = dead_run(tmp_path / "elsewhere")
    link = base / f"{PREFIX}link"
    link.symlink_to(elsewhere.path, target_is_directory=True)
    RunDirectory.create()
    RunDirectory(link).remove()
    assert link.is_symlink()
    assert (elsewhere.path / RUN_FILE).exists()


def test_a_directory_of_another_user_is_neither_swept_nor_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    dead, real = dead_run(), os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: real + 1)
    RunDirectory._sweep(dead.path.parent)
    dead.remove()
    assert (dead.path / RUN_FILE).exists()


def test_what_vanishes_during_a_sweep_harms_nobody(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter([base / f"{PREFIX}gone"]))
    assert RunDirectory.create().path.exists()


def sockets(*lines: str) -> None:
    """What the kernel is to say of bound sockets."""
    head = "Num       RefCount Protocol Flags    Type St Inode Path"
    numbered = [f"0000000000000000: 00000002 00000000 00010000 0005 01 {n} {line}" for n, line in enumerate(lines)]
    run_directory.BOUND_SOCKETS.write_text("\n".join([head, *numbered]) + "\n")


def test_a_run_at_a_place_of_its_own_is_found_by_the_door_it_has_bound(base: Path, tmp_path: Path) -> None:
    below, other = live_run(base / "a run"), live_run(tmp_path / "other")
    sockets(
        "",
        "@abstract",
        f"{below.path}/control",
        f"{tmp_path}/no-run/supervisor",
        "supervisor",
        f"{other.path}/supervisor",
    )
    assert RunDirectory.find()[0].path == other.path  # another folder, and there is none in ours
    sockets(f"{other.path}/supervisor", f"{below.path}/supervisor", f"{below.path}/trial/supervisor")
    assert RunDirectory.find()[0].path == below.path
    usual = live_run()
    assert {found.path for found, _ in RunDirectory.live()} == {below.path, usual.path}


def test_a_directory_that_cannot_be_filled_leaves_nothing(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for refused in ("open", "mkfifo"):
        with monkeypatch.context() as patched:
            patched.setattr(os, refused, lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.raises(UserError, match="cannot make the run directory: No space left on device"):
                RunDirectory.create()
        assert list(base.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not valid JSON: .* the file is damaged, remove "),
        ('{"run": "a", "run": "b"}', "the field 'run' appears twice; the file is damaged, remove "),
        ("[]", "expected a JSON object; the file is damaged, remove "),
        ('{"protocol": "2.0"}', "RunFile.run: missing"),
        ('{"protocol": "1.0"}', "'1.0' is not 2"),
    ],
)
def test_a_damaged_or_foreign_file_is_a_persons_error(content: str, complaint: str) -> None:
    directory = RunDirectory.create()
    (directory.path / RUN_FILE).write_text(content)
    with pytest.raises(UserError, match=complaint):
        directory.read()


def test_a_wrong_field_is_named() -> None:
    directory = RunDirectory.create()
    directory.publish(run_file(directory), "{}", "{}")
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
