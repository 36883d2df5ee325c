"""However a run ends, nothing of it stays: Ctrl-C at any moment, kills of the command and of the supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from neuronpipe.plans.package.reader import Package

from tests.pipeline import PATIENCE_S, SLOWER, Shell, eventually

Converted = Callable[..., Package]


def started(shell: Shell, package: Path, verb: str = "run") -> subprocess.Popen[str]:
    """A command that would generate for minutes, as the leader of a group like in a terminal."""
    words = ("-p", "x", "-n", "100", "--ffn-resident", "10%") if verb == "run" else ()
    return shell.start(verb, package, *words, start_new_session=True)


def first_character(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.read(2)  # the prompt and a token


@pytest.fixture(scope="module")
def package(converted: Converted) -> Path:
    return converted("awkward", "q8").path


def test_ctrl_c_ends_a_run_at_once(shell: Shell, package: Path) -> None:
    process = started(shell, package)
    first_character(process)
    before = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert errors == "neuronpipe: interrupted\n"
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
            assert shell.call("down").code == 0
        assert eventually(lambda: not shell.leftovers(), 5), (delay_s, shell.leftovers(), errors)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_killed_takes_its_run_along(shell: Shell, package: Path, number: signal.Signals) -> None:
    process = started(shell, package)
    first_character(process)
    os.kill(process.pid, number)
    process.communicate(timeout=PATIENCE_S)
    assert eventually(lambda: not shell.leftovers())


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
