"""However a run ends, nothing of it stays: Ctrl-C at any moment, signals to the command, kills of it and of the
supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.package.reader import Package

from tests.http_client import served
from tests.pipeline import PATIENCE_S, SLOWER, Shell, beside_progress, eventually

Converted = Callable[..., Package]


def started(shell: Shell, package: Path, verb: str = "run") -> subprocess.Popen[str]:
    """A command that would generate for minutes, as the leader of a group like in a terminal."""
    words = {
        "run": ("-p", "x", "-n", "100", "--ffn-resident", "10%"),
        "bench": ("--json", "--tests", "tg16", "--repetitions", "1000"),
        "serve": ("--port", "0"),
    }.get(verb, ())
    return shell.start(verb, package, *words, start_new_session=True)


def first_character(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.read(2)  # the prompt and a token


@pytest.fixture(scope="module")
def package(converted: Converted) -> Path:
    return converted("awkward", "q8").path


@pytest.mark.alone
def test_ctrl_c_ends_a_run_at_once(shell: Shell, package: Path) -> None:
    process = started(shell, package)
    first_character(process)
    before = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert beside_progress(errors) == "neuronpipe: interrupted\n"
    assert not shell.leftovers()
    assert time.monotonic() - before < 5 * SLOWER


@pytest.mark.parametrize("verb", ["run", "up"])
def test_ctrl_c_while_it_starts_leaves_nothing(shell: Shell, package: Path, verb: str) -> None:
    """From when Python runs until all services do, in steps: the moments differ from machine to machine."""
    for delay_s in (0.1, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.7):
        process = started(shell, package, verb)
        time.sleep(delay_s)
        os.killpg(process.pid, signal.SIGINT)
        out, errors = process.communicate(timeout=PATIENCE_S)
        if verb == "up" and out:  # it was faster, and has said where the run is
            assert shell.call("down", "--run", out.splitlines()[0].removeprefix("up: ")).code == 0
        assert eventually(lambda: not shell.leftovers(), 5), (delay_s, shell.leftovers(), errors)


def test_a_command_that_is_killed_takes_its_run_along(shell: Shell, package: Path) -> None:
    process = started(shell, package)
    first_character(process)
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    assert eventually(lambda: not shell.leftovers())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("verb", ["run", "bench", "serve", "up"])
def test_a_command_that_is_told_to_end_ends_its_run_first(
    shell: Shell, package: Path, verb: str, number: signal.Signals
) -> None:
    process = started(shell, package, verb)
    if verb in ("run", "serve"):
        first_character(process)
    else:  # `up` ends by itself soon after
        assert eventually(lambda: list(shell.folder.glob("neuronpipe-*/run.json")))
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert not shell.leftovers()  # at once: whoever starts the next one need not wait
    said = "" if verb == "serve" else f"neuronpipe: ended by {number.name}\n"
    assert (process.returncode, beside_progress(errors).rpartition("\r")[2]) == (0, said)


def test_a_server_that_is_told_to_end_has_closed_its_port_when_its_command_ends(shell: Shell) -> None:
    with served(shell) as server:
        server.process.terminate()
        server.process.wait(PATIENCE_S)
        with pytest.raises(ConnectionRefusedError):
            server.connect()
        assert not shell.leftovers()


def test_a_server_of_somebody_elses_run_that_is_told_to_end_leaves_the_run(shell: Shell) -> None:
    with shell.up(DEMO) as run, served(shell, "--run", run.path) as server:
        server.process.terminate()
        assert server.process.wait(PATIENCE_S) == 0
        assert run.status().ready


@pytest.mark.nightly
def test_a_watcher_that_is_told_to_end_leaves_and_that_is_no_error(shell: Shell) -> None:
    with shell.up(DEMO) as run:
        process = shell.start("watch", "--json", run.path)
        first_character(process)
        process.terminate()
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, errors) == (0, "")
        assert run.status().ready


@pytest.mark.nightly
def test_other_commands_say_which_signal_ended_them(shell: Shell) -> None:
    with shell.up(DEMO, "--workers", "1") as run:
        process = shell.start("ask", "--run", run.path, "-p", "def f(", "-n", "480", "--ignore-end")
        first_character(process)
        process.terminate()
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, errors) == (128 + signal.SIGTERM, "neuronpipe: ended by SIGTERM\n")
        assert eventually(lambda: run.status().sequences_active == 0)


@pytest.mark.nightly
def test_a_signal_that_is_ignored_from_the_start_ends_nothing(shell: Shell, package: Path) -> None:
    process = shell.start(
        "run", package, "-p", "x", "-n", "8", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    first_character(process)
    process.send_signal(signal.SIGHUP)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert "[8 tokens, " in errors


@pytest.mark.alone
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_hastens_the_end_and_the_command_still_waits_for_it(
    shell: Shell, first: signal.Signals
) -> None:
    """A stopped coordinator does not drain: that takes 1.5 s, and 1 s until it is killed."""
    with served(shell) as server:
        os.kill(server.run.pid("coordinator"), signal.SIGSTOP)
        server.process.send_signal(first)
        time.sleep(0.3)
        assert server.process.poll() is None
        began = time.monotonic()
        server.process.terminate()
        assert server.process.wait(PATIENCE_S) == 0
        assert time.monotonic() - began < 1 * SLOWER
        assert not shell.leftovers()


def test_a_reader_that_goes_away_ends_the_run(shell: Shell, package: Path) -> None:
    process = started(shell, package)
    first_character(process)
    assert process.stdout is not None
    process.stdout.close()
    process.wait(PATIENCE_S)
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    assert eventually(lambda: not shell.leftovers())


def test_no_service_outlives_its_supervisor(shell: Shell, package: Path) -> None:
    said = shell.json("up", package)
    assert len(shell.processes()) >= 6
    os.kill(said["supervisor_pid"], signal.SIGKILL)
    assert eventually(lambda: not shell.processes())
    assert shell.call("status", "--run", said["run"]).code == 3
    with shell.up(package) as run:  # the next start clears what it could not
        assert run.path != Path(said["run"])
        assert not Path(said["run"]).exists()
