"""The loader in C that was written from SPEC.md: the same tokens as with ours."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from neuronpipe.plans.package.reader import Package

from tests.conformance.checkpoints import RECIPES, tokens
from tests.moved_scales import move_scales
from tests.pipeline import Shell, eventually

Converted = Callable[..., Package]


def test_the_demo_says_the_same_with_half_of_its_neurons_resident(shell: Shell, loader_in_c: Path) -> None:
    words = ("run", "-p", "import os", "-n", "8", "--ffn-resident", "50%")
    ours = shell.json(*words)
    theirs = shell.json(*words, "--use", f"loader=argv:{loader_in_c}")
    assert theirs["token_ids"] == ours["token_ids"]
    assert theirs["flash"]["bytes"] > 0


@pytest.mark.nightly
def test_it_puts_scales_where_the_plan_moves_them(shell: Shell, converted: Converted, loader_in_c: Path) -> None:
    package, prompt, plan = converted("awkward", "q4"), tokens(RECIPES["awkward"], 9), shell.folder / "plan.json"
    assert shell.call("plan", package.path, "--ffn-resident", "60%", "--without", "bundle", "-o", plan).code == 0
    move_scales(plan, package.manifest)
    with shell.up(package.path, "--plan", plan) as run:
        ours = run.ask(prompt, 12)["token_ids"]
        shell.json("swap", "loader", "--use", f"argv:{loader_in_c}", "--run", run.path)
        theirs = run.ask(prompt, 12, share_prefix=False)
    assert theirs["token_ids"] == ours
    assert theirs["flash"]["bytes"] > 0


def runs(pid: int, program: Path) -> bool:
    """Whether it was started for this program; /proc/PID/exe would be the emulator, under one."""
    return os.fsencode(program) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def test_it_is_started_again_and_swapped_like_ours(shell: Shell, converted: Converted, loader_in_c: Path) -> None:
    prompt = tokens(RECIPES["relu2"], 9)
    with shell.up(converted("relu2", "f16").path, "--ffn-resident", "50%") as run:
        said = run.ask(prompt, 16)["token_ids"]
        pid = shell.json("swap", "loader", "--use", f"argv:{loader_in_c}", "--run", run.path)["pids"]["loader.0"]
        assert runs(pid, loader_in_c)
        assert run.ask(prompt, 16, share_prefix=False)["token_ids"] == said
        os.kill(pid, signal.SIGKILL)
        assert run.ask(prompt, 16, share_prefix=False)["token_ids"] == said
        assert eventually(lambda: run.status().ready)
        assert runs(run.pid("loader"), loader_in_c)
