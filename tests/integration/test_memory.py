"""The memory limit, seen from outside: proportional set sizes of all processes in sum, all the time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.plans.package.reader import Package

from tests.integration.large_package import write_large_package
from tests.pipeline import Shell

Converted = Callable[..., Package]
IDLE_MOST_BYTES = 150 << 20
SAMPLE_S = 0.03
ASK = ("-p", "the rain in the other house", "-n", "5")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return write_large_package(tmp_path_factory.mktemp("large") / "package")


def run_watched(shell: Shell, package: Path, *options: str) -> tuple[dict[str, Any], int]:
    """The JSON of a run, and the most memory that was seen while it lived."""
    process = shell.start("run", package, *ASK, "--json", *options)
    peak, samples = 0, 0
    while process.poll() is None:
        peak, samples = max(peak, shell.pss_bytes()), samples + 1
        time.sleep(SAMPLE_S)
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    assert samples > 10
    return json.loads(out), peak


def test_a_model_that_does_not_fit_stays_below_its_limit(shell: Shell, large: Package) -> None:
    plan = shell.json("plan", large.path)["memory"]
    ffn = plan["ffn_bytes"]
    assert ffn > 280 << 20
    parts = ("interpreters", "fixed", "kv", "exchange", "residency", "private")
    others = sum(plan[f"{part}_bytes"] for part in parts)
    limit = int(1.02 * (others + ffn / 2))
    limited, peak = run_watched(shell, large.path, "--memory", str(limit))
    unlimited, most = run_watched(shell, large.path)
    print(f"limit {limit >> 20} MiB, peak {peak >> 20} MiB; without a limit {most >> 20} MiB")
    assert limited["memory"]["limit_bytes"] == limit
    assert peak < limit < most
    assert 0.8 * peak < limited["memory"]["peak_bytes"] < limit  # what the run says of itself is what is seen
    assert 0.8 * most < unlimited["memory"]["peak_bytes"]
    assert limited["flash"]["bytes"] > ffn / 4
    assert limited["flash"]["miss_rate"] > unlimited["flash"]["miss_rate"]  # which starts while neurons still arrive
    assert limited["token_ids"] == unlimited["token_ids"]


def test_an_idle_run_of_a_small_model_is_small(shell: Shell, converted: Converted) -> None:
    with shell.up(converted("awkward", "q8").path) as run:
        run.ask("the rain", 4)
        time.sleep(0.3)
        idle = shell.pss_bytes()
    print(f"idle {idle >> 20} MiB")
    assert idle <= IDLE_MOST_BYTES
