"""Steps that come without messages say what steps by messages say, and are most of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.protocol.messages.request import Bias

from tests.pipeline import Run, Shell, eventually

COUNTING = """
from pathlib import Path

from neuronpipe.protocol.messages.outcome import StepDone
from neuronpipe.services.coordinator.coordinator_service import CoordinatorService
from neuronpipe.services.worker.decode import DecodeService


class Counting(CoordinatorService):
    def _take_over(self, peer, message):
        if isinstance(message, StepDone):
            with Path(__file__).with_name("answers.txt").open("a") as file:
                file.write(peer + "\\n")
        super()._take_over(peer, message)


class Undecided(CoordinatorService):
    # Its scheduler drafts tokens after it has let a step be sent that has none.

    def __init__(self, *arguments):
        super().__init__(*arguments)
        builder = self._scheduler._builder
        builder.may_draft = lambda sequence: False
        builder._drafted = lambda batch: batch[0].drafter.draft(3) if batch[0].drafter else ()


class ByMessages(DecodeService):
    def compute(self, step):
        return super().compute(step)
"""
PROMPT = "def area(width, height):"
MOST = 60
ASKS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 7},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "seed": 3},
    "biased": {"logit_bias": (Bias(token=5, bias=2.0),), "ignore_end": True},
    "logprobs": {"logprobs": 2},
    "a schema": {"grammar": "{}", "temperature": 0.8, "seed": 5},
    "a stop text": {"stop": ("return",)},
}


def started(shell: Shell, *words: str) -> Any:
    (shell.folder / "counting.py").write_text(COUNTING)
    return shell.up(
        DEMO,
        "--workers",
        "2",
        "--sequences",
        "2",
        "--use",
        "coordinator=counting:Counting",
        "--without",
        "drafts",
        *words,
        cwd=shell.folder,
    )


@pytest.fixture(scope="module")
def run(long_shell: Shell) -> Iterator[Run]:
    with started(long_shell) as live:
        yield live


@pytest.fixture(scope="module")
def by_messages(long_shell: Shell) -> Iterator[Run]:
    with started(long_shell, "--use", "decode=counting:ByMessages") as live:
        yield live


def answers(folder: Path) -> int:
    file = folder / "answers.txt"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.parametrize("ask", ASKS)
def test_texts_are_those_of_steps_by_messages(run: Run, by_messages: Run, ask: str) -> None:
    one, other = run.ask(PROMPT, MOST, **ASKS[ask]), by_messages.ask(PROMPT, MOST, **ASKS[ask])
    assert one["token_ids"] == other["token_ids"]
    assert (one["text"], one["reason"], one["tokens"]) == (other["text"], other["reason"], other["tokens"])
    assert one.get("logprobs") == other.get("logprobs")
    assert one["flash"]["active_share"] == other["flash"]["active_share"]  # of what the workers counted


def test_most_steps_of_a_text_come_without_messages(run: Run, by_messages: Run, long_shell: Shell) -> None:
    def answered(live: Run) -> int:
        before = answers(long_shell.folder)
        assert live.ask(PROMPT, MOST, ignore_end=True)["tokens"] == MOST
        return answers(long_shell.folder) - before

    assert answered(by_messages) == 2 * (MOST - 1)  # from two workers; the first token is the prompt's
    assert 0 < answered(run) < MOST


def test_texts_that_come_and_go_meanwhile_change_nothing(run: Run, by_messages: Run) -> None:
    prompts = [PROMPT, "import os", "class Stack:", "def add(a, b):", "for i in"]
    expected = [by_messages.ask(prompt, 20 + 5 * n)["token_ids"] for n, prompt in enumerate(prompts)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        said = [threads.submit(run.ask, prompt, 20 + 5 * n) for n, prompt in enumerate(prompts)]
    assert [one.result()["token_ids"] for one in said] == expected


def test_a_worker_that_listens_is_drained_and_beats(run: Run, long_shell: Shell) -> None:
    expected = run.ask(PROMPT, MOST)["token_ids"]
    assert long_shell.call("swap", "decode.1", "--run", run.path).code == 0
    assert run.ask(PROMPT, MOST)["token_ids"] == expected
    time.sleep(0.5)
    assert eventually(lambda: {one.state for one in run.status().processes if one.role == "decode"} == {"ready"})


def test_a_step_that_was_sent_ahead_and_is_not_decided_on_is_given_up(shell: Shell) -> None:
    (shell.folder / "counting.py").write_text(COUNTING)
    words = ("--workers", "2", "--use", "coordinator=counting:Undecided")
    repeated = 4 * "def area(width, height):\n    return width * height\n\n"
    with shell.up(DEMO, *words, cwd=shell.folder) as run:
        single = run.ask(repeated, MOST, draft=False)["token_ids"]
        log = run.path / "coordinator.0.log"

        def is_given_up() -> bool:
            assert run.ask(repeated, MOST)["token_ids"] == single
            return "was not decided on" in log.read_text()

        assert eventually(is_given_up, 20), "no step was sent ahead"
