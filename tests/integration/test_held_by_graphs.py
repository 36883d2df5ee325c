"""Hot blocks by ONNX Runtime's graphs, through the whole pipeline: numerics of their own, that are said; a death costs
no text."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.launch.planning import DEMO

from tests.conformance.specs import SPECS, write_package
from tests.pipeline import Run, Shell, eventually

if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime")):
    pytest.skip("the extra [npu] is not installed", allow_module_level=True)

PROMPT = "def main(arguments):\n    for name in arguments"
ONNX = ("--backend", "accelerator=onnx:cpu")
TOKENS, LONG_TOKENS = 12, 32


@pytest.fixture(scope="module")
def run(long_shell: Shell) -> Iterator[Run]:
    """One run for all: a part of the blocks, so that decode workers compute the others."""
    with long_shell.up(DEMO, *ONNX, "--workers", "2", "--sequences", "4", "--gpu-memory", "6MiB") as live:
        yield live


def at_once(run: Run, lengths: list[int]) -> list[list[int]]:
    answers: list[Any] = [None] * len(lengths)

    def ask(number: int) -> None:
        answers[number] = run.ask(PROMPT, lengths[number])["token_ids"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(lengths))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def restarts(run: Run) -> int:
    return sum(process.restarts for process in run.status().processes if process.role == "accelerator")


def test_a_text_is_the_same_again_and_whoever_comes_with_it(run: Run) -> None:
    first = run.ask(PROMPT, TOKENS)
    assert 0 < first["accelerator_share"] < 1
    lengths = [TOKENS, 3, 7, TOKENS]
    assert at_once(run, lengths) == [first["token_ids"][:length] for length in lengths]


def test_the_status_names_its_numerics(run: Run) -> None:
    numerics = {one.role: one.numerics for one in run.status().processes}
    assert numerics["accelerator"] == f"onnx-cpu-held+{numerics['decode']}"
    assert numerics["prefill"] == numerics["decode"]


def test_texts_are_told_whole_while_it_is_killed(run: Run) -> None:
    """By whom they are computed changes in the middle, so that they need not be what they were."""
    before = run.ask(PROMPT, TOKENS)["token_ids"]
    over, killed, restarts_before = threading.Event(), set(), restarts(run)

    def kill() -> None:
        for _ in range(2):
            time.sleep(0.4)
            with contextlib.suppress(StopIteration, ProcessLookupError):
                os.kill(pid := run.pid("accelerator"), signal.SIGKILL)
                killed.add(pid)
        over.set()

    killing = threading.Thread(target=kill)
    killing.start()
    lengths = [2 * TOKENS, 5, 17, 30]
    while not over.is_set():
        assert [len(answer) for answer in at_once(run, lengths)] == lengths
    killing.join()
    assert killed
    # Until its end is noticed, the run counts as ready without it.
    assert eventually(lambda: restarts(run) == restarts_before + len(killed) and run.status().ready, 30)
    again = run.ask(PROMPT, TOKENS)
    assert again["token_ids"] == before
    assert again["accelerator_share"] > 0


@pytest.mark.parametrize(
    "killed",
    [
        ("loader", 0),
        *(
            pytest.param((role, index), marks=pytest.mark.nightly)
            for role, index in (("decode", 0), ("decode", 1), ("cache", 0), ("prefill", 0))
        ),
    ],
)
def test_a_text_keeps_its_bits_while_any_other_process_is_killed(long_shell: Shell, killed: tuple[str, int]) -> None:
    """In its middle, with half of the neurons on flash; the accelerator has its share all the time."""
    with long_shell.up(DEMO, *ONNX, "--workers", "2", "--ffn-resident", "50%", "--gpu-memory", "6MiB") as half_resident:
        before = half_resident.ask(PROMPT, LONG_TOKENS)
        pid, told = half_resident.pid(*killed), threading.Event()

        def kill() -> None:
            time.sleep(0.1)
            os.kill(pid, signal.SIGKILL)
            told.set()

        threading.Thread(target=kill).start()
        during = half_resident.ask(PROMPT, LONG_TOKENS)
        assert told.wait(5)
        assert eventually(lambda: pid not in {one.pid for one in half_resident.status().processes if one.pid})
        after = half_resident.ask(PROMPT, LONG_TOKENS)
    assert before["token_ids"] == during["token_ids"] == after["token_ids"]
    assert min(one["accelerator_share"] for one in (before, during, after)) > 0


def test_a_fresh_one_is_tested_and_takes_its_place(run: Run, long_shell: Shell) -> None:
    before = run.ask(PROMPT, TOKENS)["token_ids"]
    done = long_shell.call("swap", "accelerator", "--run", run.path)
    assert done.code == 0, done.out
    assert run.ask(PROMPT, TOKENS)["token_ids"] == before


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--backend", "accelerator=onnx"), "names no provider"),
        (("--backend", "accelerator=onnx:cpu", "--gpu-memory", "64KiB"), "did you mean 64MiB?"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(shell: Shell, options: tuple[str, ...], why: str) -> None:
    assert why in shell.refused("plan", DEMO, *options)


def test_a_model_without_a_relu_gate_is_refused(shell: Shell, tmp_path: Path) -> None:
    package = write_package(tmp_path / "package", SPECS["qwen3"], "q8")
    assert "onnx needs a gate and one of relu, drelu" in shell.refused("plan", package.path, *ONNX)
