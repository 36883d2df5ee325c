"""A run whose plan is wrong by a planted factor says so, and the next plan is made with what it measured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.history.history_file import history_folder
from neuronpipe.plans.plan.document import read_plan

from tests.pipeline import Shell, eventually

LIMIT = ("--mode", "predicted", "--memory", "256MiB", "--ffn-resident", "40%")
TOKENS = 200


@pytest.fixture(autouse=True)
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that runs of other tests have kept."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def wrong_plan(shell: Shell, file: Path, **factors: float) -> Path:
    """The demo's plan, with these figures of its expectation wrong by a factor."""
    assert shell.call("plan", DEMO, *LIMIT, "--without", "drafts", "-o", file).code == 0
    plan = read_plan(file)
    figures: dict[str, Any] = {name: factor * getattr(plan.expected, name) for name, factor in factors.items()}
    expected = dataclasses.replace(plan.expected, **figures)
    file.write_text(dataclasses.replace(plan, expected=expected).to_json())
    return file


@pytest.mark.nightly
def test_a_wrong_term_is_named_within_two_hundred_tokens_and_corrected_for_the_next_start(
    shell: Shell, tmp_path: Path
) -> None:
    file = wrong_plan(shell, tmp_path / "plan.json", miss_rate=0.4)
    with shell.up(DEMO, "--plan", file) as run:
        first = run.ask("def f(x):", TOKENS)["token_ids"]
        status = run.status()
        assert status.deviations.startswith("misses: planned ")
        assert "off the plan: misses: planned" in shell.call("status", "--run", run.path).out
        for _ in range(5):  # as many tokens as a plan is made from
            assert run.ask("def f(x):", TOKENS)["token_ids"] == first
        measured = run.status().miss_rate
    (kept,) = history_folder().glob("*.json")
    assert not any(word in kept.read_text() for word in ("def", "text", "token_ids"))
    shown = shell.call("plan", DEMO, *LIMIT).out
    assert "tokens of your own" in shown
    assert "earlier runs, planned -> measured" in shown
    explained = shell.call("plan", DEMO, *LIMIT, "--explain").out
    assert explained.startswith("expects  ")
    assert shown.endswith(explained[explained.index("earlier runs") :])
    assert "runs have counted" in shell.call("inspect", DEMO).out
    plans = [shell.json("plan", DEMO, *LIMIT) for _ in range(2)]
    assert plans[0] == plans[1]
    assert abs(plans[0]["expected"]["miss_rate"] - measured) <= 0.2 * measured
    assert len(plans[0]["earlier_runs"]) == 1
    forgotten = shell.json("plan", DEMO, *LIMIT, "--forget")
    assert forgotten["earlier_runs"] == []
    assert not any("your own" in reason for reason in forgotten["reasons"])
    assert not list(history_folder().glob("*.json"))
    none = "earlier runs of this package on this device: none"
    assert none in shell.call("plan", DEMO, *LIMIT, "--explain").out
    assert "earlier runs" not in shell.call("plan", "turbosparse-100m", "--explain").out, "a shape has no runs"


def test_nothing_is_kept_of_a_run_that_says_so_or_of_an_experiment(shell: Shell) -> None:
    for words in (("--no-history",), ("--without", "prefetch")):
        with shell.up(DEMO, *LIMIT, *words) as run:
            run.ask("def f(x):", 120)
        assert not list(history_folder().glob("*.json"))


def test_a_plan_file_and_no_history_go_together(shell: Shell, tmp_path: Path) -> None:
    file = wrong_plan(shell, tmp_path / "plan.json")
    with shell.up(DEMO, "--plan", file, "--no-history") as run:
        run.ask("def f(x):", 4)
        assert eventually(lambda: run.status().tokens == 4)
    assert json.loads(file.read_text())["corrections"] == {"kernels": 1.0, "reads": 1.0}
    assert not list(history_folder().glob("*.json"))
