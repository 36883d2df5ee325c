"""Dense feed-forwards in slices, with Down by output: the same text in any memory, with any workers, after a crash."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from neuronpipe.plans.models.spec import LayerKind
from neuronpipe.plans.package.reader import Package

from tests.conformance.specs import SPECS, write_package
from tests.pipeline import Shell

MODEL = replace(SPECS["slices"], layer_kinds=(LayerKind(4),), neurons=2048)
PROMPTS = [[n * 7 % 500 for n in range(start, start + length)] for start, length in ((3, 70), (40, 5), (90, 31))]
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    written = write_package(tmp_path_factory.mktemp("slices") / "package", MODEL, "q8")
    assert written.manifest.layout.slices == 4
    return written


def test_their_text_depends_neither_on_memory_nor_on_workers(shell: Shell, package: Package) -> None:
    texts = []
    for options in (("--workers", "1"), ("--ffn-resident", "30%"), ("--ffn-resident", "60%", "--workers", "1")):
        with shell.up(package.path, "--sequences", "3", *options) as run:
            answers = [run.ask(prompt, MAX_TOKENS) for prompt in PROMPTS]
            with ThreadPoolExecutor(len(PROMPTS)) as threads:
                at_once = list(threads.map(lambda prompt: run.ask(prompt, MAX_TOKENS), PROMPTS))
            assert [answer["token_ids"] for answer in at_once] == [answer["token_ids"] for answer in answers]
            texts.append([answer["token_ids"] for answer in answers])
            reads = sum(answer["flash"]["reads"] for answer in answers)
            assert (reads > 0) == ("--ffn-resident" in options)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("role", ["decode", "loader", "cache", "prefill"])
def test_their_text_survives_the_end_of_a_process(shell: Shell, package: Package, role: str) -> None:
    with shell.up(package.path, "--ffn-resident", "50%", "--workers", "2") as run:
        expected = run.ask(PROMPTS[0], MAX_TOKENS)["token_ids"]
        os.kill(run.pid(role), signal.SIGKILL)
        assert run.ask(PROMPTS[0], MAX_TOKENS)["token_ids"] == expected


def test_thresholds_need_neurons_instead(shell: Shell, package: Package, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three " * 400)
    refused = shell.refused("profile", package.path, "--silent", "50%", "--text", text)
    assert "its feed-forwards are stored as wholes" in refused
    assert "--by-neuron" in refused
