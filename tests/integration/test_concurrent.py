"""Several clients at once: the tokens that each gets alone, in shared steps, from shared prefixes, and never a hang."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from neuronpipe.launch.client import attach
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.messages.client import Accepted, Finished, Refused, Token
from neuronpipe.protocol.messages.request import Cancel, Generate

from tests.conformance.checkpoints import RECIPES, tokens
from tests.pipeline import PATIENCE_S, Run, Shell, eventually

Converted = Callable[..., Package]
COMMON = tokens(RECIPES["awkward"], 40)
PROMPTS = [[*COMMON, number, *range(number, number + 5)] for number in (3, 50, 100, 150)]
MOST = 24


@pytest.fixture(scope="module")
def package(converted: Converted) -> Package:
    return converted("awkward", "q8")


@pytest.fixture(scope="module")
def run(long_shell: Shell, package: Package) -> Iterator[Run]:
    with long_shell.up(package.path, "--workers", "2", "--sequences", "4") as live:
        yield live


@pytest.fixture(scope="module")
def alone(run: Run) -> list[list[int]]:
    """What each prompt's text is when nobody else asks, and nothing is shared."""
    return [run.ask(prompt, MOST)["token_ids"] for prompt in PROMPTS]


def ask_at_once(run: Run, prompts: Sequence[list[int]] = PROMPTS, **options: Any) -> list[dict[str, Any]]:
    """All prompts at once, each by a client of its own."""
    answers: list[dict[str, Any]] = [{} for _ in prompts]

    def ask(number: int) -> None:
        answers[number] = run.ask(prompts[number], MOST, **options)

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(PATIENCE_S)
    return answers


def overwrite(run: Run) -> None:
    """Other texts in every slot: what is not copied or computed from here on is wrong."""
    ask_at_once(run, [[number, *reversed(COMMON), *COMMON[:20]] for number in (7, 8, 9, 10)])


def test_texts_at_once_share_steps_and_get_the_tokens_each_gets_alone(run: Run, alone: list[list[int]]) -> None:
    before = run.status()
    answers = ask_at_once(run)
    after = run.status()
    assert [answer["token_ids"] for answer in answers] == alone
    assert after.tokens - before.tokens == len(PROMPTS) * MOST
    assert after.steps - before.steps < 0.75 * len(PROMPTS) * MOST


def test_a_shared_prefix_changes_no_token(run: Run, alone: list[list[int]]) -> None:
    overwrite(run)
    before = run.status().cached_tokens
    answers = ask_at_once(run, share_prefix=True)
    assert [answer["token_ids"] for answer in answers] == alone
    shared = [answer["cached_tokens"] for answer in answers]
    assert sorted(shared) == [0] + 3 * [len(COMMON)]
    assert run.status().cached_tokens - before == sum(shared)
    again = run.ask(PROMPTS[0], MOST, share_prefix=True)
    assert again["token_ids"] == alone[0]
    assert again["cached_tokens"] == len(PROMPTS[0]) - 1
    longer = PROMPTS[0] + alone[0][: MOST // 2]
    assert run.ask(longer, MOST // 2, share_prefix=True)["token_ids"] == alone[0][MOST // 2 :]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_prefix_is_still_there_when_a_worker_was_killed(run: Run, alone: list[list[int]], role: str) -> None:
    overwrite(run)
    run.ask(PROMPTS[1], MOST)
    os.kill(run.pid(role), signal.SIGKILL)
    answer = run.ask(PROMPTS[1], MOST, share_prefix=True)
    assert answer["cached_tokens"] == len(PROMPTS[1]) - 1
    assert answer["token_ids"] == alone[1]


def test_a_prefix_in_the_midst_of_being_shared_survives_kills(run: Run, alone: list[list[int]]) -> None:
    """Kills while four texts are copied, prefilled and decoded."""
    assert eventually(lambda: run.status().ready)
    overwrite(run)
    killing = threading.Timer(0.02, lambda: os.kill(run.pid("prefill"), signal.SIGKILL))
    killing.start()
    answers = ask_at_once(run, share_prefix=True)
    killing.join()
    assert [answer["token_ids"] for answer in answers] == alone


def test_a_coordinator_that_was_restarted_shares_nothing_of_before(
    shell: Shell, package: Package, alone: list[list[int]]
) -> None:
    with shell.up(package.path, "--workers", "2") as run:
        assert run.ask(PROMPTS[2], MOST, share_prefix=True)["token_ids"] == alone[2]
        os.kill(run.pid("coordinator"), signal.SIGKILL)
        answer = run.ask(PROMPTS[2], MOST, share_prefix=True)
        assert (answer["token_ids"], answer["cached_tokens"]) == (alone[2], 0)


def test_more_requests_than_may_wait_are_refused_at_once_and_the_rest_are_served(run: Run) -> None:
    asked = 200  # of which 4 are served at once, and 80 may wait
    with attach(run.path) as client:
        for number in range(asked):
            client.send(Generate(request=str(number), tokens=(1, 2, number), max_tokens=2))
        refused: set[str] = set()
        finished: set[str] = set()
        for message in client.replies():
            if isinstance(message, Refused):
                assert message.code == "busy"
                refused.add(message.request)
            elif isinstance(message, Finished):
                finished.add(message.request)
            if len(refused | finished) == asked:
                break
    assert refused
    assert len(finished) >= 80


def test_a_cancelled_text_gives_its_slot_to_one_that_waits(run: Run) -> None:
    with attach(run.path) as client:
        for number in range(5):
            client.send(Generate(request=str(number), tokens=(1, 2, 3), max_tokens=80, ignore_end=True))
        started: set[str] = set()
        cancelled_at = 0.0
        accepted = 0
        for message in client.replies():
            accepted += isinstance(message, Accepted)
            if isinstance(message, Token) and message.index == 0:
                started.add(message.request)
                if message.request == "4":
                    break
            if len(started) == 4 and not cancelled_at:
                client.send(Cancel(request="2"))
                cancelled_at = time.monotonic()
            if isinstance(message, Finished):
                assert (message.request, message.reason) == ("2", "cancelled")
                assert message.tokens < 80
        assert accepted == 5
        for number in range(5):
            client.send(Cancel(request=str(number)))
        assert eventually(lambda: run.status().sequences_active == 0)


def test_a_run_that_stays_has_fewer_slots_where_memory_is_short(shell: Shell, package: Package) -> None:
    """By default; who asks for so many is told what they would need."""
    options = ("--workers", "1", "--context", "128")
    said = shell.refused("plan", package.path, "--memory", "1048576", "--sequences", "4", *options)
    least = int(said.split("the least for this package is ")[1].split(" bytes")[0])
    with shell.up(package.path, "--memory", str(least - 1), *options) as run:
        assert run.status().max_sequences < 4
    assert "--memory" in shell.refused("up", package.path, "--memory", str(least - 1), "--sequences", "4", *options)
