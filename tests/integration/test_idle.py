"""A run that nobody uses sleeps: no timers that poll. What happens in its sleep is noticed all the same."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.http_client import Server, served
from tests.idle_cost import cost_over
from tests.pipeline import PATIENCE_S, Shell, eventually

WAKEUPS_PER_S = 2.0
WINDOW_S = 2.0
ASK = {"prompt": "def f(", "max_tokens": 2}


@pytest.fixture(scope="module")
def server(long_shell: Shell) -> Iterator[Server]:
    with served(long_shell) as one:
        yield one


def sleeps(server: Server) -> bool:
    """Whether all processes of the run together, and the command, woke at most twice a second for a while."""
    woken = cost_over(server.run.shell.processes(), WINDOW_S).wakeups
    return woken.total() <= WAKEUPS_PER_S * WINDOW_S


def state_of(server: Server, role: str) -> str:
    return next(one.state for one in server.run.status().processes if one.role == role)


def test_a_run_that_nobody_uses_wakes_less_than_twice_a_second(server: Server) -> None:
    """It once woke ninety times a second, and took three percent of a core."""
    assert server.post("/v1/completions", **ASK).status == 200
    assert eventually(lambda: sleeps(server), PATIENCE_S)
    assert server.post("/v1/completions", **ASK).status == 200  # and is there at once


@pytest.mark.nightly
def test_a_process_that_dies_while_the_run_sleeps_is_replaced_in_its_sleep(server: Server) -> None:
    pids = {role: server.run.pid(role) for role in ("cache", "decode", "coordinator", "gateway")}
    assert eventually(lambda: sleeps(server), PATIENCE_S)
    for role, pid in pids.items():
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)  # nobody asks anything meanwhile
        assert eventually(lambda role=role, pid=pid: server.run.has(role) and server.run.pid(role) != pid)
    assert eventually(lambda: server.run.status().ready)
    assert server.post("/v1/completions", **ASK).status == 200
    assert eventually(lambda: sleeps(server), PATIENCE_S)


def test_a_process_that_hangs_is_seen_though_the_run_slept_before(server: Server) -> None:
    assert eventually(lambda: sleeps(server), PATIENCE_S)
    pid = server.run.pid("cache")
    os.kill(pid, signal.SIGSTOP)
    try:
        assert eventually(lambda: state_of(server, "cache") == "silent")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert eventually(lambda: all(one.state == "ready" for one in server.run.status().processes))
