"""An embedding that stays on flash: the same bits as in memory, less memory, and a damaged row fails what needs it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.run_directory import RunDirectory

from tests.conformance.checkpoints import RECIPES, tokens
from tests.flash_embedding import leave_embedding_on_flash
from tests.pipeline import Run, Shell

Converted = Callable[..., Package]


def plan_file(shell: Shell, package: Package, name: str, *options: str) -> Path:
    file = shell.folder / name
    done = shell.call("plan", package.path, "--ffn-resident", "60%", *options, "-o", file)
    assert done.code == 0, done.errors
    return file


def bits(run: Run, prompt: list[int]) -> tuple[list[int], Any]:
    """Greedy tokens, and all keys and values that were computed."""
    token_ids = run.ask(prompt, 12)["token_ids"]
    with RunDirectory(run.path).read().open_segment("kv") as segment:
        return token_ids, np.array(segment.map().view("kv"))


@pytest.mark.parametrize(
    ("recipe", "quantization", "options"),
    [
        ("awkward", "q4", ("--workers", "2")),
        pytest.param("awkward", "f16", ("--workers", "1"), marks=pytest.mark.nightly),
        pytest.param("mixtral", "q8", ("--workers", "2", "--sequences", "2"), marks=pytest.mark.nightly),
    ],
)
def test_it_changes_no_bit(
    shell: Shell, converted: Converted, recipe: str, quantization: str, options: tuple[str, ...]
) -> None:
    package, prompt = converted(recipe, quantization), tokens(RECIPES[recipe], 70)
    plan = plan_file(shell, package, "plan.json", *options)
    with shell.up(package.path, "--plan", plan) as run:
        in_memory = bits(run, prompt)
    leave_embedding_on_flash(plan, package.manifest)
    with shell.up(package.path, "--plan", plan) as run:
        on_flash = bits(run, prompt)
    assert on_flash[0] == in_memory[0]
    assert in_memory[1].any()
    assert np.array_equal(on_flash[1], in_memory[1])


def test_its_place_in_memory_is_not_written(shell: Shell, converted: Converted) -> None:
    package = converted("awkward", "q8")
    plan = plan_file(shell, package, "plan.json")
    resident_bytes = []
    for _ in range(2):
        with shell.up(package.path, "--plan", plan) as run:
            run.ask("the rain", 2)
            with RunDirectory(run.path).read().open_segment("fixed") as segment:
                resident_bytes.append(segment.resident_bytes)
        leave_embedding_on_flash(plan, package.manifest)
    entry = package.embedding_quants
    saved_bytes = resident_bytes[0] - resident_bytes[1]
    assert 0 <= entry.stop - entry.start - saved_bytes < 3 * 4096  # pages with other bytes, and the checksums


def test_a_damaged_row_fails_the_texts_that_need_it(shell: Shell, converted: Converted, tmp_path: Path) -> None:
    shutil.copytree(converted("awkward", "q4").path, tmp_path / "package")
    package = Package.open(tmp_path / "package")
    plan = plan_file(shell, package, "plan.json")
    leave_embedding_on_flash(plan, package.manifest)
    entry = package.embedding_quants
    with shell.up(package.path, "--plan", plan) as run:
        answer = run.ask([5, 7, 9], 1)["token_ids"]
        with package.fixed_path.open("r+b") as file:
            file.seek(entry.start + 300 * entry.row_bytes)
            file.write(b"\xff" * entry.row_bytes)
        with pytest.raises(UserError, match=r"fixed\.safetensors: a row of `embedding`"):
            run.ask([5, 300, 9], 1)
        assert run.ask([5, 7, 9], 1)["token_ids"] == answer
        assert all(process.restarts == 0 for process in run.status().processes)


@pytest.mark.nightly
def test_a_trial_before_a_swap_shares_what_is_in_memory(shell: Shell, converted: Converted, loader_in_c: Path) -> None:
    package, prompt = converted("awkward", "q4"), tokens(RECIPES["awkward"], 9)
    for on_flash in (False, True):
        plan = plan_file(shell, package, "plan.json", "--without", "bundle")
        if on_flash:
            leave_embedding_on_flash(plan, package.manifest)
        with shell.up(package.path, "--plan", plan) as run:
            before = run.ask(prompt, 6)["token_ids"]
            shell.json("swap", "loader", "--use", f"argv:{loader_in_c}", "--run", run.path)
            assert run.ask(prompt, 6)["token_ids"] == before


@pytest.mark.nightly
def test_the_loader_in_c_leaves_it_on_flash(shell: Shell, converted: Converted, loader_in_c: Path) -> None:
    package, prompt = converted("awkward", "q4"), tokens(RECIPES["awkward"], 9)
    plan = plan_file(shell, package, "plan.json", "--without", "bundle")
    leave_embedding_on_flash(plan, package.manifest)
    answers = []
    for use in ((), ("--use", f"loader=argv:{loader_in_c}")):
        with shell.up(package.path, "--plan", plan, *use) as run:
            answers.append(bits(run, prompt))
    assert answers[0][0] == answers[1][0]
    assert np.array_equal(answers[0][1], answers[1][1])
