"""The committed demo model through the whole pipeline: it is the default, it is small, and it writes Python."""

from __future__ import annotations

import time

import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.package.reader import Package

from tests.integration.test_memory import IDLE_MOST_BYTES
from tests.pipeline import Shell

PROMPT = "def fibonacci(n):"
MAX_PACKAGE_BYTES = 16 << 20


def test_its_files_are_whole_and_small() -> None:
    package = Package.open(DEMO)
    package.verify_fixed()
    assert sum(file.stat().st_size for file in DEMO.iterdir()) <= MAX_PACKAGE_BYTES
    assert package.manifest.model.activation == "drelu"


def test_it_is_what_runs_when_no_package_is_named(shell: Shell) -> None:
    said = shell.json("run", "-p", PROMPT, "-n", "40")
    assert said["tokens"] == 40
    assert said["text"].startswith("\n")  # and an indented body comes next
    assert said["text"].lstrip("\n").startswith("    ")


@pytest.mark.parametrize("share", [pytest.param("50%", marks=pytest.mark.nightly), "10%"])
def test_with_a_share_of_its_neurons_it_reads_flash_and_says_the_same(shell: Shell, share: str) -> None:
    whole = shell.json("run", "-p", PROMPT, "-n", "32")
    part = shell.json("run", "-p", PROMPT, "-n", "32", "--ffn-resident", share)
    assert part["text"] == whole["text"]
    assert part["flash"]["bytes"] > 0
    assert part["flash"]["miss_rate"] > 0


def test_it_is_idle_in_little_memory(shell: Shell) -> None:
    with shell.up(DEMO) as run:
        run.ask(PROMPT, 16)
        time.sleep(0.3)
        idle = shell.pss_bytes()
    print(f"idle {idle >> 20} MiB")
    assert idle <= IDLE_MOST_BYTES


def test_drawn_texts_come_again_with_their_seed(shell: Shell) -> None:
    with shell.up(DEMO) as run:
        sampled = [run.ask(PROMPT, 24, temperature=0.8, top_p=0.95, seed=seed)["text"] for seed in (1, 2, 1)]
        stopped = run.ask(PROMPT, 64, stop=("return",))
    assert sampled[0] == sampled[2]
    assert sampled[0] != sampled[1]
    assert "return" not in stopped["text"]
