"""Any service may be killed at any moment: it is started again and the text goes on with the same tokens."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError

from tests.conformance.checkpoints import RECIPES, tokens
from tests.faults.kills import MAX_DELAY_S, kill_in_a_step
from tests.faults.served_kills import SERVED, survive
from tests.pipeline import PATIENCE_S, Run, Shell, eventually

Converted = Callable[..., Package]
PROMPT = 2 * tokens(RECIPES["awkward"], 40)
MOST = 32
OPTIONS = ("--ffn-resident", "30%", "--workers", "2")  # so slow that a kill hits anything, step or message
PROCESSES = [("decode", 0), ("decode", 1), ("loader", 0), ("cache", 0), ("prefill", 0)]


@pytest.fixture(scope="module")
def package(converted: Converted) -> Package:
    return converted("awkward", "q8")


@pytest.fixture(scope="module")
def undisturbed(long_shell: Shell, package: Package) -> list[int]:
    with long_shell.up(package.path) as run:
        return list(run.ask(PROMPT, MOST)["token_ids"])


@pytest.fixture(scope="module")
def run(long_shell: Shell, package: Package) -> Iterator[Run]:
    """One run for all: it takes 4 kills of each process, one less than would end it within seconds."""
    with long_shell.up(package.path, *OPTIONS) as live:
        yield live


def restarts(run: Run, role: str, index: int = 0) -> int:
    return next(p.restarts for p in run.status().processes if (p.role, p.index) == (role, index))


def ask_through_kills(run: Run, processes: list[tuple[str, int]], seed: int) -> tuple[list[int], list[float]]:
    """Ask, and kill these processes one after the other at random moments; (tokens, seconds until the next token)."""
    times: list[float] = []
    kills: list[float] = []
    answer: list[int] = []
    draw = random.Random(seed)

    def ask() -> None:
        answer.extend(run.ask(PROMPT, MOST, seen=lambda token: times.append(time.monotonic()))["token_ids"])

    asking = threading.Thread(target=ask)
    asking.start()
    for role, index in processes:
        time.sleep(draw.uniform(0.0, MAX_DELAY_S))
        assert eventually(lambda: run.status().ready)
        kills.append(time.monotonic())
        os.kill(run.pid(role, index), signal.SIGKILL)
    asking.join(PATIENCE_S)
    assert not asking.is_alive(), f"no answer after killing {processes}"
    took = [min((at for at in times if at > kill), default=kill) - kill for kill in kills]
    return answer, took


@pytest.mark.parametrize("process", PROCESSES)
def test_the_text_goes_on_with_the_same_tokens(run: Run, undisturbed: list[int], process: tuple[str, int]) -> None:
    pid, before = run.pid(*process), restarts(run, *process)
    answer, took = ask_through_kills(run, 2 * [process], seed=PROCESSES.index(process))
    assert answer == undisturbed
    # The last kill may come as the text ends: it is ready from before, until the kill is noticed.
    assert eventually(lambda: restarts(run, *process) == before + 2 and run.status().ready)
    assert run.pid(*process) != pid
    print(f"{process[0]}.{process[1]}: next token after {', '.join(f'{1000 * s:.0f}' for s in took)} ms")


def test_a_prompt_on_a_processors_runtime_survives_a_kill_in_its_middle(shell: Shell) -> None:
    pytest.importorskip("onnxruntime")
    prompt = random.Random(2).choices(range(3, 4000), k=470)
    with shell.up(DEMO, "--backend", "prefill=onnx:cpu", "--ffn-resident", "30%") as run:
        expected = run.ask(prompt, MOST)["token_ids"]
        answers: list[list[int]] = []
        asking = threading.Thread(target=lambda: answers.append(run.ask(prompt, MOST)["token_ids"]))
        asking.start()
        kill_in_a_step(run, "prefill")
        asking.join(PATIENCE_S)
        assert answers == [expected]
        assert restarts(run, "prefill") == 1


def test_kills_at_random_moments_change_and_leak_nothing(shell: Shell) -> None:
    """Of every process once, coordinator and gateway among them; what each has open afterwards is what it had before.
    By night there are two hundred."""
    for role, seconds in survive(shell, len(SERVED), seed=4).took_s().items():
        print(f"{role}: next tokens after {', '.join(f'{1000 * s:.0f}' for s in seconds)} ms")


def test_a_coordinator_that_was_killed_answers_again(shell: Shell, package: Package, undisturbed: list[int]) -> None:
    with shell.up(package.path) as run:
        answer, took = ask_through_kills(run, [("coordinator", 0)], seed=1)
        print(f"coordinator.0: next token after {1000 * took[0]:.0f} ms")
        assert answer == undisturbed
        assert eventually(lambda: run.status().ready)
        assert restarts(run, "coordinator") == 1
        assert run.ask(PROMPT, MOST)["token_ids"] == undisturbed


def test_a_service_that_cannot_live_ends_the_run(shell: Shell, package: Package) -> None:
    """Too many deaths within seconds: the run ends and says which process it was, instead of starting it for ever."""
    with shell.up(package.path) as run:
        kills = 0
        while kills < 20:
            try:
                os.kill(run.pid("cache"), signal.SIGKILL)
                kills += 1
            except (ProcessLookupError, StopIteration):
                pass  # it is just being started
            except UserError:
                break
            time.sleep(0.1)
        assert eventually(lambda: not shell.leftovers())
        assert kills > 3
