"""Value slots that hold the scales of their rows: the same bits, whoever fills the slots."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import read_plan
from neuronpipe.protocol.run_directory import RunDirectory

from tests.conformance.checkpoints import RECIPES, tokens
from tests.moved_scales import move_scales
from tests.pipeline import Run, Shell

Converted = Callable[..., Package]
KINDS = (("awkward", "drelu"), ("llama3", "relu"), ("turbosparse", "drelu"))


def planned(shell: Shell, package: Package) -> tuple[Path, Path]:
    """A plan, and the same with scales moved."""
    file, moved = shell.folder / "plan.json", shell.folder / "plan-moved.json"
    words = ("--ffn-resident", "60%", "--without", "bundle", "--workers", "2", "-o", file)
    done = shell.call("plan", package.path, *words)
    assert done.code == 0, done.errors
    shutil.copy(file, moved)
    move_scales(file, package.manifest, moved=False)
    move_scales(moved, package.manifest)
    assert [read_plan(one).memory.are_scales_moved for one in (file, moved)] == [False, True]
    return file, moved


def said(run: Run, prompt: list[int]) -> tuple[list[int], Any]:
    """Its greedy tokens, and all keys and values: these show the bits of every product but the last layer's."""
    asked = run.ask(prompt, 12, share_prefix=False)
    assert asked["flash"]["bytes"] > 0
    with RunDirectory(run.path).read().open_segment("kv") as segment:
        return asked["token_ids"], np.array(segment.map().view("kv"))


@pytest.mark.parametrize(("recipe", "activation"), KINDS)
def test_they_change_no_bit(shell: Shell, converted: Converted, recipe: str, activation: str) -> None:
    package, prompt = converted(recipe, "q4", activation), tokens(RECIPES[recipe], 9)
    answers = []
    for plan in planned(shell, package):
        with shell.up(package.path, "--plan", plan) as run:
            answers.append(said(run, prompt))
    assert answers[0][0] == answers[1][0]
    assert answers[0][1].any()
    assert np.array_equal(answers[0][1], answers[1][1])
