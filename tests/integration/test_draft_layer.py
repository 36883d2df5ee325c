"""The draft layer of a model in real processes: right drafts are accepted, and no draft changes a token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.plans.convert.conversion import convert
from neuronpipe.protocol.messages.client import Token

from tests.conformance.checkpoints import RECIPES, write_checkpoint
from tests.conformance.draft_tensors import draft_tensors, foreseeing
from tests.integration.test_drafts import killed
from tests.pipeline import Run, Shell, eventually

PROMPT = "the rain in spain stays"
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 3},
    "penalized": {"repetition_penalty": 1.05, "frequency_penalty": 0.1},
    "with log-probabilities": {"logprobs": 2},
}
NAMES = ("qwen3.5", "qwen3.5 moe", "qwen3 next")


@pytest.fixture(scope="module", params=[("foreseeing", "1"), ("foreseeing", "2"), ("random", "2")], ids="-".join)
def run(
    long_shell: Shell, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[str, Run]]:
    kind, workers = request.param
    folder: Path = tmp_path_factory.mktemp("drafts")
    recipe = RECIPES["qwen3.5 moe"]
    more = foreseeing(recipe) if kind == "foreseeing" else draft_tensors(recipe)
    package = convert(write_checkpoint(folder / "model", recipe, more), folder / "package", quantization="q8")
    with long_shell.up(package.path, "--ffn-resident", "70%", "--workers", workers) as live:
        yield kind, live


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_draft_layer_changes_no_token(run: tuple[str, Run], sampling: str) -> None:
    _, live = run
    options = {**SAMPLINGS[sampling], "ignore_end": True}
    drafted = live.ask(PROMPT, 60, **options)
    single = live.ask(PROMPT, 60, draft=False, **options)
    names = ("token_ids", "text", "reason", "logprobs")
    assert [drafted.get(name) for name in names] == [single.get(name) for name in names]
    assert single["drafted_tokens"] == 0


def test_right_drafts_are_accepted_and_a_layer_that_is_wrong_is_hardly_asked(run: tuple[str, Run]) -> None:
    """The layer of a random model is wrong nearly always. It is tried again after RETRY_STEPS steps without it."""
    kind, live = run
    answers = [live.ask(PROMPT, 90, ignore_end=True) for _ in range(2)]
    drafted, accepted = (sum(answer[f"{name}_tokens"] for answer in answers) for name in ("drafted", "accepted"))
    if kind == "foreseeing":
        assert 0 < accepted == drafted
    else:
        assert 0 < drafted < 2 * 90 / 3


def test_a_killed_worker_changes_no_token_of_a_draft_layer(run: tuple[str, Run]) -> None:
    _, live = run
    expected = live.ask(PROMPT, 90, draft=False, ignore_end=True)["token_ids"]

    def kill_now_and_then(token: Token) -> None:
        if token.index in (30, 60):
            assert eventually(lambda: killed(live))

    assert live.ask(PROMPT, 90, seen=kill_now_and_then, ignore_end=True)["token_ids"] == expected
