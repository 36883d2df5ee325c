"""Runs and commands in different PID namespaces that share a folder, as containers do, and commands that are the first
process of one."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from neuronpipe.launch.planning import DEMO

from tests.http_client import request, served
from tests.pipeline import COMMAND, PATIENCE_S, Shell, beside_progress, eventually

FIRST_PROCESS = ("unshare", "--pid", "--fork", "--mount-proc", *COMMAND)


@pytest.fixture(autouse=True, scope="module")
def permitted() -> None:
    tried = subprocess.run([*FIRST_PROCESS[:4], "true"], check=False, capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"PID namespaces are not permitted here: {tried.stderr.strip()}")


def test_a_run_in_another_pid_namespace_leaves_a_live_one_alone(shell: Shell) -> None:
    with served(shell) as server:
        done = shell.call("run", "-p", "x", "-n", "2", program=FIRST_PROCESS)
        assert done.code == 0, done.errors
        assert server.run.path.exists()
        for program in (COMMAND, FIRST_PROCESS):
            assert shell.json("status", program=program)["ready"]
        assert shell.json("watch", "--once")["ready"]
        with server.connect() as line:
            line.sendall(request("GET", "/live"))
            assert line.recv(1 << 10).startswith(b"HTTP/1.1 200")


def test_a_run_in_another_pid_namespace_is_asked_and_ended_but_its_memory_is_not_to_be_seen(shell: Shell) -> None:
    run = Path(shell.json("up")["run"])
    try:
        assert shell.json("ask", "-p", "x", "-n", "2", program=FIRST_PROCESS)["tokens"] == 2
        done = shell.call("watch", "--once", program=FIRST_PROCESS)
        (line,) = beside_progress(done.errors).splitlines()
        assert done.code == 2
        assert "is not to be seen from here; do this in the container where the run was started" in line
        assert shell.json("down", program=FIRST_PROCESS) == {"run": str(run), "stopped": True}
        assert shell.processes() == []
        assert not run.exists()
    finally:
        shell.call("down", "--run", run)


@pytest.mark.parametrize("words", [("serve", "--port", "0"), ("run", "-p", "def f(", "-n", "480", "--ignore-end")])
def test_the_first_process_of_a_container_ends_its_run_when_it_is_told_to(shell: Shell, words: tuple[str, ...]) -> None:
    process = shell.start(*words, program=FIRST_PROCESS)
    assert process.stdout is not None
    assert process.stdout.read(8)
    (first,) = psutil.Process(process.pid).children()
    os.kill(first.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_S)
    said = "" if words[0] == "serve" else "neuronpipe: ended by SIGTERM\n"
    assert (process.returncode, beside_progress(errors)) == (0, said)
    assert not shell.leftovers()


def test_the_first_process_of_a_container_that_still_starts_ends_when_it_is_told_to(shell: Shell) -> None:
    process = shell.start("up", DEMO, program=FIRST_PROCESS)
    assert eventually(lambda: list(shell.folder.glob("neuronpipe-*")))
    (first,) = psutil.Process(process.pid).children()
    os.kill(first.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (0, "neuronpipe: ended by SIGTERM\n")
    assert not shell.leftovers()
