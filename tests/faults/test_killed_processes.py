"""Any service may be killed at any moment: it is started again and the text goes on with the same tokens."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from neuronpipe.plans.package.reader import Package

from tests.conformance.checkpoints import RECIPES, tokens
from tests.pipeline import Run, Shell, eventually

Converted = Callable[..., Package]
PROMPT = tokens(RECIPES["awkward"], 20)
MOST = 40
OPTIONS = ("--ffn-resident", "30%", "--workers", "2")  # so slow that a kill hits anything, step or message


@pytest.fixture(scope="module")
def package(converted: Converted) -> Package:
    return converted("awkward", "q8")


@pytest.fixture(scope="module")
def undisturbed(long_shell: Shell, package: Package) -> list[int]:
    with long_shell.up(package.path) as run:
        return list(run.ask(PROMPT, MOST)["token_ids"])


@pytest.fixture
def run(shell: Shell, package: Package) -> Iterator[Run]:
    with shell.up(package.path, *OPTIONS) as live:
        yield live


def restarts(run: Run, role: str, index: int = 0) -> int:
    return next(p.restarts for p in run.status().processes if (p.role, p.index) == (role, index))


def ask_through_kills(run: Run, seats: list[tuple[str, int]], seed: int) -> tuple[list[int], list[float]]:
    """Ask, and kill these seats one after the other at random moments; (tokens, seconds until the next token)."""
    times: list[float] = []
    kills: list[float] = []
    answer: list[int] = []
    draw = random.Random(seed)

    def ask() -> None:
        answer.extend(run.ask(PROMPT, MOST, seen=lambda token: times.append(time.monotonic()))["token_ids"])

    asking = threading.Thread(target=ask)
    asking.start()
    for role, index in seats:
        time.sleep(draw.uniform(0.0, 0.4))
        assert eventually(lambda: run.status().ready)
        kills.append(time.monotonic())
        os.kill(run.pid(role, index), signal.SIGKILL)
    asking.join(60)
    assert not asking.is_alive(), f"no answer after killing {seats}"
    took = [min((at for at in times if at > kill), default=kill) - kill for kill in kills]
    return answer, took


@pytest.mark.parametrize("seat", [("decode", 0), ("decode", 1), ("loader", 0), ("cache", 0), ("prefill", 0)])
def test_the_text_goes_on_with_the_same_tokens(run: Run, undisturbed: list[int], seat: tuple[str, int]) -> None:
    before = run.pid(*seat)
    answer, took = ask_through_kills(run, 3 * [seat], seed=hash(seat) % 1000)
    assert answer == undisturbed
    assert eventually(lambda: run.status().ready)
    assert restarts(run, *seat) == 3
    assert run.pid(*seat) != before
    print(f"{seat[0]}.{seat[1]}: next token after {', '.join(f'{1000 * s:.0f}' for s in took)} ms")
    assert run.ask(PROMPT, MOST)["token_ids"] == undisturbed


@pytest.mark.parametrize("seed", range(2))
def test_kills_at_random_change_nothing(run: Run, undisturbed: list[int], seed: int) -> None:
    seats = [("decode", 0), ("decode", 1), ("loader", 0), ("cache", 0), ("prefill", 0)]
    random.Random(seed).shuffle(seats)
    answer, took = ask_through_kills(run, seats, seed)
    print(f"next token after {', '.join(f'{1000 * s:.0f}' for s in took)} ms")
    assert answer == undisturbed
