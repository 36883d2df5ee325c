"""The memory limit, seen from outside: proportional set sizes of all processes in sum, all the time."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.package.reader import Package

from tests.integration.large_package import write_large_package
from tests.pipeline import Shell

Converted = Callable[..., Package]
IDLE_MOST_BYTES = 150 << 20
OWN_MOST_BYTES = 9 << 20  # of a command beside its run, measured: 6.1 MiB, and 12.8 before
BESIDE_ROLES = 4  # processes; a run has more once all its roles have been started
SAMPLE_S = 0.03
ROOT = Path(__file__).resolve().parents[2]
ASK = ("-p", "the rain in the other house", "-n", "5")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return write_large_package(tmp_path_factory.mktemp("large") / "package")


def run_watched(shell: Shell, package: Path, *options: str, ask: tuple[str, ...] = ASK) -> tuple[dict[str, Any], int]:
    """The JSON of a run, and the most memory that was seen while it lived."""
    process = shell.start("run", package, *ask, "--json", *options)
    peak, samples = 0, 0
    while process.poll() is None:
        peak, samples = max(peak, shell.pss_bytes()), samples + 1
        time.sleep(SAMPLE_S)
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    assert samples > 10
    return json.loads(out), peak


@pytest.mark.alone
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


def least_bytes(shell: Shell, package: Path, *options: str) -> int:
    """The least limit of a package."""
    refused = shell.refused("plan", package, "--memory", "1048576", *options)
    return int(refused.split("the least for this package is ")[1].split(" bytes")[0])


@pytest.mark.nightly
def test_a_processors_runtime_stays_within_the_limit(shell: Shell, large: Package) -> None:
    """The plan counts it, and cuts prompts so that it fits. Blocks of neurons stream through the slots meanwhile. The
    prompt nearly fills a chunk, so that what is set aside for one is used."""
    pytest.importorskip("onnxruntime")
    options = ("--backend", "prefill=onnx:cpu", "--sequences", "1")
    limit = least_bytes(shell, large.path, *options) + large.manifest.files["bundles.bin"].bytes // 4
    chunk = shell.json("plan", large.path, *options, "--memory", str(limit))["compute"]["prefill_chunk_tokens"]
    ask = ("-p", "the rain " * (chunk // 8), "-n", "5")  # of seven tokens each
    limited, peak = run_watched(shell, large.path, *options, "--memory", str(limit), ask=ask)
    print(f"limit {limit >> 20} MiB, peak {peak >> 20} MiB, chunks of {chunk} tokens")
    assert limited["memory"]["limit_bytes"] == limit
    assert 0.8 * limit < peak < limit


@pytest.mark.nightly
@pytest.mark.parametrize("more_bytes", [0, 32 << 20])
def test_an_emulated_processor_stays_within_the_limit(shell: Shell, more_bytes: int) -> None:
    """At the least limit, and where chunks are long and windows small."""
    pytest.importorskip("onnxruntime_qnn")
    options = ("--backend", "prefill=onnx:qnn-emulated", "--sequences", "1")
    limit = least_bytes(shell, DEMO, *options) + more_bytes
    limited, peak = run_watched(shell, DEMO, *options, "--memory", str(limit))
    print(f"limit {limit >> 20} MiB, peak {peak >> 20} MiB")
    assert limited["memory"]["limit_bytes"] == limit
    assert 0.8 * limit < peak < limit


@pytest.mark.alone
def test_what_a_runtime_takes_is_what_the_plan_counts(large: Package) -> None:
    pytest.importorskip("onnxruntime")
    command = [sys.executable, "-m", "tests.bench.npu_memory", large.path, "cpu", "512"]
    measured, planned = json.loads(subprocess.run(command, capture_output=True, check=True, cwd=ROOT).stdout).values()
    print(f"measured {measured >> 20} MiB, planned {planned >> 20} MiB")
    assert measured <= planned <= 1.2 * measured


@pytest.mark.parametrize(
    "words",
    [("run", "-p", "def f", "-n", "300"), pytest.param(("bench", "--tests", "tg128"), marks=pytest.mark.nightly)],
)
def test_a_command_shares_what_its_run_inherits(shell: Shell, words: tuple[str, ...]) -> None:
    """The collector of the command wrote to every object that it shared, so that 7 MiB of them became its own."""
    process, own = shell.start(*words, "--json"), []
    while process.poll() is None:
        if len(shell.processes()) > BESIDE_ROLES:
            with contextlib.suppress(OSError, ValueError):
                own.append(private_dirty_bytes(process.pid))
        time.sleep(SAMPLE_S)
    assert process.communicate() is not None
    assert process.returncode == 0
    print(f"private {statistics.median(own) / (1 << 20):.1f} MiB")
    assert statistics.median(own) < OWN_MOST_BYTES


def private_dirty_bytes(pid: int) -> int:
    """Of a process, what no other one shares and no file holds."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * int(rollup.partition("Private_Dirty:")[2].split()[0])


def test_an_idle_run_of_a_small_model_is_small(shell: Shell, converted: Converted) -> None:
    with shell.up(converted("awkward", "q8").path) as run:
        run.ask("the rain", 4)
        time.sleep(0.3)
        idle = shell.pss_bytes()
    print(f"idle {idle >> 20} MiB")
    assert idle <= IDLE_MOST_BYTES
