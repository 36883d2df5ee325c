"""`watch`: live runs as JSON, on a screen, through a watch server over TCP; the watched run does not notice."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.watch.sources import RemoteSource
from neuronpipe.protocol.channel import Subscriber, open_context
from neuronpipe.protocol.guarded import WatchKeys, endpoint
from neuronpipe.protocol.links import EVENTS, WATCH
from neuronpipe.protocol.messages.event import StepEvent
from neuronpipe.protocol.messages.request import AskStatus

from tests.integration.chatter import BEATS
from tests.pipeline import PATIENCE_S, Run, Shell, eventually

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(long_shell: Shell) -> Iterator[Run]:
    with long_shell.up(DEMO, "--ffn-resident", "50%") as made:
        yield made


@pytest.fixture
def server(run: Run) -> Iterator[tuple[str, int]]:
    """A watch server: its invitation and the process that keeps it."""
    process = run.shell.start("watch", "--invite", "--run", run.path)
    assert process.stdout is not None
    line = process.stdout.readline()
    yield re.fullmatch(r"neuronpipe watch '(.+)'\n", line)[1], process.pid  # type: ignore[index]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


def _end(process: subprocess.Popen[str]) -> None:
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def seen_through(far: RemoteSource, run: Run) -> bool:
    run.ask("def f", max_tokens=4)
    far.poll(True)
    return far.latest is not None and far.latest.tokens > 0


def test_one_snapshot_as_json_says_how_the_run_is(run: Run) -> None:
    run.ask("def f(x):", max_tokens=8)
    said = run.shell.json("watch", "--once", run.path)
    status = run.status()
    assert (said["type"], said["source"], said["model"]) == ("Snapshot", str(run.path), "neuronpipe-demo")
    assert (said["tokens"], said["steps"], said["ready"]) == (status.tokens, status.steps, True)
    assert {one["pid"] for one in said["processes"]} == {one.pid for one in status.processes}


def test_the_first_line_of_a_stream_says_how_the_run_is(run: Run) -> None:
    """A run that is ready was said to be starting, up 0 s: the coordinator had not been heard yet."""
    uptime_s = run.status().uptime_s
    process = run.shell.start("watch", "--json", "--every", "3600", "--run", run.path)
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    process.stdout.close()  # as `head -1` does
    process.terminate()
    _end(process)
    assert (first["type"], first["source"], first["ready"]) == ("Snapshot", str(run.path), True)
    assert first["uptime_s"] >= uptime_s > 0


class Lines:
    """What a command prints, a JSON object a line, as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.so_far = process, list[dict[str, Any]]()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.so_far.extend(map(json.loads, self.process.stdout))

    def leave(self) -> None:
        """Ctrl-C, which is no error."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(PATIENCE_S) == 0
        self._thread.join()
        _end(self.process)


def test_json_streams_events_and_snapshots_until_somebody_leaves(run: Run) -> None:
    lines = Lines(run.shell.start("watch", "--json", "--every", "0.1", "--run", run.path))

    def told() -> bool:
        run.ask("def f(x):", max_tokens=4)
        shots = [line for line in lines.so_far if line["type"] == "Snapshot"]
        return {"StepEvent", "Beat"} <= {line["type"] for line in lines.so_far} and bool(shots and shots[-1]["tbt_ms"])

    try:
        assert eventually(told)
    finally:
        lines.leave()


def test_the_screen_is_drawn_and_moved_and_q_leaves(run: Run) -> None:
    master, slave = pty.openpty()
    # Few lines: how many the figures above the processes take depends on what happened lately.
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 60, 0, 0))
    process = run.shell.start("watch", run.path, stdin=slave, stdout=slave)
    os.close(slave)
    try:
        shown = b""
        while b"tokens/s" not in shown or "↓".encode() not in shown:
            shown += os.read(master, 1 << 16)
        assert b"decode.0" not in shown
        os.write(master, b"\x1b[B\x1b[Bjj ")  # as many keys as a hand can press at once; an arrow is no Escape
        while b"decode.0" not in shown:
            shown += os.read(master, 1 << 16)
    finally:
        os.write(master, b"q")
        while process.poll() is None:  # it ends only once its last frame is read
            try:
                os.read(master, 1 << 16)
            except OSError:
                break
        os.close(master)
        assert process.wait(PATIENCE_S) == 0
        _end(process)


def test_several_runs_are_watched_at_once_and_the_end_of_one_is_said(run: Run) -> None:
    with run.shell.up(DEMO) as other:
        lines = Lines(run.shell.start("watch", "--json"))  # every live run of this user
        both = {str(run.path), str(other.path)}
        try:
            assert eventually(lambda: {line["source"] for line in lines.so_far} == both)
            other.down()
            assert eventually(
                lambda: str(other.path) in [one["source"] for one in lines.so_far if one["type"] == "Ended"]
            )
        finally:
            lines.leave()


def test_a_watch_server_shows_the_run_to_who_has_the_key(run: Run, server: tuple[str, int]) -> None:
    events = []
    with contextlib.closing(RemoteSource(server[0])) as far:
        assert eventually(lambda: seen_through(far, run))
        assert far.latest is not None
        assert far.latest.processes[0].memory_bytes

        def has_answer() -> bool:
            run.ask("def f", max_tokens=4)
            events.extend(far.poll(True))
            return any(isinstance(event, StepEvent) for event in events)

        assert eventually(has_answer)
        with pytest.raises(TypeError, match="does not travel this way"):
            far._subscriber._send([], AskStatus())  # nothing can be sent towards the run


def test_a_wrong_key_no_key_and_garbage_get_nothing_and_hurt_nobody(run: Run, server: tuple[str, int]) -> None:
    address, pid = server
    host, port = "127.0.0.1", int(address.split(":")[2].partition("?")[0])
    wrong_address = forged(address, guest=True)
    with (
        open_context() as context,
        contextlib.closing(RemoteSource(address)) as right,
        contextlib.closing(RemoteSource(wrong_address)) as wrong,
    ):
        none = Subscriber(context, WATCH, endpoint(host, port))
        for _ in range(20):
            with socket.create_connection((host, port)) as raw:
                raw.sendall(os.urandom(2000))
        assert eventually(lambda: seen_through(right, run))
        assert eventually(lambda: wrong.poll(True) or wrong.ended)
        assert "refuses this key" in (wrong.ended or "")
        assert wrong.latest is None
        assert none.receive(100) is None
    os.kill(pid, 0)


def test_who_waits_at_a_server_in_vain_is_told_why(run: Run, server: tuple[str, int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        closed = f"tcp://127.0.0.1:{nobody.getsockname()[1]}?{server[0].partition('?')[2]}"
    for address, why in (
        (closed, "no watch server answers there"),
        (forged(server[0], guest=False), "not the server of this invitation"),
    ):
        process = run.shell.start("watch", "--once", address)
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith(f"neuronpipe: {address.partition('?')[0]}: ")
        assert why in line
        process.kill()
        _end(process)


def test_a_guest_who_was_let_in_is_told_when_the_server_has_gone(run: Run) -> None:
    process = run.shell.start("watch", "--invite", "--run", run.path)
    assert process.stdout is not None
    line = process.stdout.readline()
    with contextlib.closing(RemoteSource(line.split("'")[1])) as far:
        assert eventually(lambda: seen_through(far, run))
        assert far.awaits == ""
        process.terminate()
        _end(process)
        assert eventually(lambda: far.poll(True) is not None and "no watch server answers there" in far.awaits)


def forged(address: str, *, guest: bool) -> str:
    """An invitation whose server, or whose guest, is another."""
    place, _, key = address.partition("key=")
    right, other = (base64.urlsafe_b64decode(one + "==") for one in (key, WatchKeys.fresh().invitation))
    keys = right[:32] + other[32:] if guest else other[:32] + right[32:]
    return f"{place}key={base64.urlsafe_b64encode(keys).decode()}"


def test_an_invitation_says_in_words_which_address_it_invites_to(run: Run) -> None:
    process = run.shell.start("watch", "--invite", "--host", "0.0.0.0", "--run", run.path)
    assert process.stdout is not None
    line = process.stdout.readline()
    process.terminate()
    _, said = process.communicate(timeout=PATIENCE_S)
    invited = re.match(r"neuronpipe watch 'tcp://(.+):\d+\?", line)[1]  # type: ignore[index]
    alone = invited == "127.0.0.1"  # a machine without another address
    assert ("this machine alone" if alone else f"any machine that reaches {invited};") in said


def test_keys_stay_in_the_run_directory_and_end_with_the_server(run: Run) -> None:
    def opened(*words: str) -> tuple[subprocess.Popen[str], str]:
        process = run.shell.start("watch", "--invite", "--run", run.path, *words)
        assert process.stdout is not None
        return process, process.stdout.readline()

    first, line = opened()
    (file,) = run.path.glob("watch-*.json")
    assert file.stat().st_mode & 0o777 == 0o600
    port = file.stem.partition("-")[2]
    first.kill()
    _end(first)
    second, same = opened("--port", port)
    assert same == line  # a server that was killed and is started again knows its guests
    second.terminate()
    assert second.wait(PATIENCE_S) == 0
    _end(second)
    assert not list(run.path.glob("watch-*.json"))
    third, fresh = opened("--port", port)
    assert fresh != line
    third.terminate()
    assert third.wait(PATIENCE_S) == 0
    _end(third)


@pytest.mark.parametrize(
    "words",
    [
        ("tcp://127.0.0.1:99?key=abc",),
        ("tcp://127.0.0.1?key=abc",),
        ("--every", "0"),
        ("--port", "7"),
        ("--invite", "--port", "70000"),
    ],
)
def test_what_cannot_be_watched_is_said_in_one_line(run: Run, words: tuple[str, ...]) -> None:
    run.shell.refused("watch", *words, beside=True)


def test_ten_monitors_that_do_not_read_are_not_waited_for(shell: Shell) -> None:
    """Their events are dropped at the coordinator, whose memory stays bounded; the tokens stay the same. Steps alone
    give forty events a second at most, which would fill the queues in minutes: hence a worker that chatters."""
    with shell.up(DEMO, "--use", "prefill=tests.integration.chatter:Chatter", cwd=ROOT) as run:
        before = run.ask("import os\n", max_tokens=40)
        assert eventually(lambda: _step_of_prefill(run) == BEATS, PATIENCE_S)
        resident_kb = _resident_kb(run.pid("coordinator"))
        with open_context() as context:
            stuck = [Subscriber(context, EVENTS, f"ipc://{run.path}/events") for _ in range(10)]
            assert eventually(lambda: all(one.receive(50) is not None for one in stuck))
            after = run.ask("import os\n", max_tokens=40)
            assert after["token_ids"] == before["token_ids"]
            assert eventually(lambda: _step_of_prefill(run) == 2 * BEATS, PATIENCE_S)
            assert _resident_kb(run.pid("coordinator")) - resident_kb < 16 << 10
            for one in stuck:
                assert BEATS / 20 < _read_to_the_end(one) < BEATS / 2


def _step_of_prefill(run: Run) -> int:
    return next(one.step for one in run.status().processes if one.role == "prefill")


def _read_to_the_end(monitor: Subscriber) -> int:
    count = 0
    while monitor.receive(100) is not None:
        count += 1
    return count


def _resident_kb(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])
