"""Drafted tokens in real processes: steps of several tokens of one text, whose tokens are those of single steps."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.protocol.messages.client import Token

from tests.pipeline import Run, Shell, eventually

REPEATED = "def add(a, b):\n    return a + b\n\n" * 6
HALF_NEW = REPEATED + "def sub(a, b):\n    return a - b\n\nclass Shape:\n"
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.7, "top_p": 0.9, "seed": 5},
    "penalized": {"repetition_penalty": 1.05, "frequency_penalty": 0.1},
    "with log-probabilities": {"logprobs": 2},
    "with a stop string": {"stop": ("(b",)},
}


def killed(run: Run) -> bool:
    """Kill the first decode worker. False while there is none, after the kill before."""
    with contextlib.suppress(StopIteration, ProcessLookupError):
        os.kill(run.pid("decode"), signal.SIGKILL)
        return True
    return False


@pytest.fixture(scope="module", params=["1", "2"])
def run(long_shell: Shell, request: pytest.FixtureRequest) -> Iterator[Run]:
    with long_shell.up(DEMO, "--workers", request.param) as live:
        yield live


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("prompt", [REPEATED, HALF_NEW])
def test_drafts_change_no_token(run: Run, prompt: str, sampling: str) -> None:
    options = SAMPLINGS[sampling]
    drafted = run.ask(prompt, 90, **options)
    single = run.ask(prompt, 90, draft=False, **options)
    names = ("token_ids", "text", "reason", "logprobs")
    assert [drafted.get(name) for name in names] == [single.get(name) for name in names]
    assert single["drafted_tokens"] == 0


def test_a_text_that_repeats_itself_accepts_drafted_tokens(run: Run) -> None:
    answer = run.ask(REPEATED, 120)
    assert 0 < answer["accepted_tokens"] <= answer["drafted_tokens"]


@pytest.mark.parametrize("tokens", [2, 3, 4, 5])
def test_a_completion_is_never_longer_than_it_may_be(run: Run, tokens: int) -> None:
    for _ in range(4):
        assert run.ask(REPEATED, 64 + tokens)["tokens"] == 64 + tokens


def test_a_killed_worker_changes_no_drafted_token(run: Run) -> None:
    expected = run.ask(REPEATED, 300, draft=False)["token_ids"]

    def kill_now_and_then(token: Token) -> None:
        if token.index in (60, 130, 200):
            assert eventually(lambda: killed(run))

    answer = run.ask(REPEATED, 300, seen=kill_now_and_then)
    assert answer["token_ids"] == expected
    assert answer["accepted_tokens"] > 0
