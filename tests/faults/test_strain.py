"""Clients that misbehave and processes that stand still: the run serves the others as if nothing were."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from neuronpipe.launch.client import attach
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import Full
from neuronpipe.protocol.messages.request import AskStatus, Generate
from neuronpipe.protocol.run_directory import RunDirectory

from tests.conformance.checkpoints import RECIPES, tokens
from tests.faults.kills import grown, open_things
from tests.pipeline import PATIENCE_S, Run, Shell, eventually

Converted = Callable[..., Package]
PROMPT = tokens(RECIPES["awkward"], 40)
OPTIONS = ("--ffn-resident", "30%", "--workers", "2")
PROCESSES = [("coordinator", 0), ("loader", 0), ("cache", 0), ("decode", 0), ("decode", 1), ("prefill", 0)]
STOPPED_S = float(os.environ.get("NEURONPIPE_TEST_STOPPED_S", "1"))  # four by night: after five it is replaced


@pytest.fixture(scope="module")
def run(long_shell: Shell, converted: Converted) -> Iterator[Run]:
    with long_shell.up(converted("awkward", "q8").path, *OPTIONS) as live:
        yield live


@pytest.fixture(scope="module")
def undisturbed(run: Run) -> list[int]:
    """What the run answers before anything has happened to it, and ever after."""
    return list(run.ask(PROMPT, 24)["token_ids"])


def control_path(run: Run) -> str:
    _, run_file = RunDirectory.find(run.path)
    return run_file.endpoints["control"].removeprefix("ipc://")


@pytest.mark.nightly
def test_a_thousand_connects_and_disconnects_leave_nothing_open(run: Run, undisturbed: list[int]) -> None:
    """Some leave at once, some with an answer on its way, some with a text being generated."""
    before = open_things(run.shell, run)
    memory_before = psutil.Process(run.pid("coordinator")).memory_info().rss
    for number in range(1000):
        with attach(run.path) as client:
            if number % 3 == 1:
                client.send(AskStatus())
            elif number % 10 == 0:
                client.send(Generate(request="r", tokens=tuple(PROMPT), max_tokens=100))
    assert eventually(lambda: run.status().sequences_active + run.status().sequences_waiting == 0, 20)
    assert run.ask(PROMPT, 24)["token_ids"] == undisturbed
    assert eventually(lambda: not grown(before, open_things(run.shell, run))), grown(
        before, open_things(run.shell, run)
    )
    assert psutil.Process(run.pid("coordinator")).memory_info().rss - memory_before < 16 << 20


def test_connections_that_say_nothing_or_half_of_it_keep_nobody_waiting(run: Run, undisturbed: list[int]) -> None:
    """More than the process may have open at once: those that find no room wait, and whoever is connected is served."""
    before = open_things(run.shell, run)
    with attach(run.path) as connected, contextlib.ExitStack() as opened:
        connected.status()
        for number in range(min(1500, psutil.Process(run.pid("coordinator")).rlimit(psutil.RLIMIT_NOFILE)[0] - 100)):
            half = opened.enter_context(socket.socket(socket.AF_UNIX))
            half.settimeout(1)
            try:
                half.connect(control_path(run))
            except (BlockingIOError, TimeoutError, OSError):
                break  # our own limit
            if number % 2:
                half.send(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03")  # a greeting, begun
        assert connected.status().ready
        assert run.ask(PROMPT, 24)["token_ids"] == undisturbed
    assert eventually(lambda: not grown(before, open_things(run.shell, run))), grown(
        before, open_things(run.shell, run)
    )


def test_a_client_that_never_reads_costs_nobody_else_anything(run: Run, undisturbed: list[int]) -> None:
    """Its texts end when its queue is full, or by themselves; what waits for it is bounded."""
    coordinator = psutil.Process(run.pid("coordinator"))
    with attach(run.path) as deaf:
        memory_before = coordinator.memory_info().rss
        for number in range(20):
            deaf.send(Generate(request=f"r{number}", tokens=tuple(PROMPT), max_tokens=60))
        with contextlib.suppress(Full):  # on a machine that is busy it cannot even ask
            for _ in range(20_000):
                deaf.send(AskStatus())
        assert run.ask(PROMPT, 24)["token_ids"] == undisturbed
        assert coordinator.memory_info().rss - memory_before < 16 << 20
    assert eventually(lambda: run.status().sequences_active + run.status().sequences_waiting == 0, 60)


def state_of(run: Run, process: tuple[str, int]) -> str:
    return next(status.state for status in run.status().processes if (status.role, status.index) == process)


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: f"{process[0]}.{process[1]}")
def test_a_process_that_stands_still_for_a_while_changes_nothing(
    run: Run, undisturbed: list[int], process: tuple[str, int]
) -> None:
    """Stopped in the middle of a text and shown as silent; continued, the text goes on."""
    seen = threading.Event()
    answer: list[int] = []

    def ask() -> None:
        answer.extend(run.ask(PROMPT, 24, seen=lambda token: seen.set())["token_ids"])

    pid, restarts = run.pid(*process), [process.restarts for process in run.status().processes]
    asking = threading.Thread(target=ask)
    asking.start()
    assert seen.wait(PATIENCE_S)
    os.kill(pid, signal.SIGSTOP)
    try:
        if process[0] != "coordinator":  # who answers that question
            assert eventually(lambda: state_of(run, process) == "silent", 5), state_of(run, process)
        time.sleep(STOPPED_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    asking.join(PATIENCE_S)
    assert answer == undisturbed
    assert [process.restarts for process in run.status().processes] == restarts
