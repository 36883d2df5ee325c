"""Mixtures in GGUF whose experts stay where they are: no second copy, the same tokens under any limit, and a file that
changes or goes away costs one line and no wrong token."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from neuronpipe.launch.client import attach
from neuronpipe.launch.scoring import score, stored_logits
from neuronpipe.plans.lab.gguf_counterpart import write_gguf_counterpart
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import read_plan
from neuronpipe.plans.plan.segment_sizes import PARTIAL_TOKENS
from neuronpipe.plans.reference.engine import ReferenceEngine
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.run_directory import PLAN_FILE, RunDirectory

from tests.conformance.checkpoints import RECIPES, Recipe, tokens
from tests.conformance.gguf_files import gemma4_keys, write_gguf
from tests.pipeline import Shell
from tests.unit.test_gguf_counterpart import MIXTURES

SHAPE = replace(MIXTURES["qwen3moe"], neurons=256, experts=12)
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 128, "norm_topk_prob": True}
RECIPE: Recipe = replace(
    RECIPES["qwen3moe"], width=128, neurons=128, experts=8, config=RECIPES["qwen3moe"].config | EXPERTS
)
METADATA = {
    "qwen3moe.expert_count": 8,
    "qwen3moe.expert_used_count": 3,
    "qwen3moe.expert_feed_forward_length": 128,
}
GPT_OSS_METADATA = {
    "gpt-oss.expert_count": 6,
    "gpt-oss.expert_used_count": 3,
    "gpt-oss.attention.sliding_window": 9,
}
GLM_METADATA = {
    "glm4moe.expert_count": 8,
    "glm4moe.expert_used_count": 3,
    "glm4moe.expert_feed_forward_length": 64,
    "glm4moe.expert_weights_scale": 1.8,
    "glm4moe.expert_weights_norm": True,
}
GLM: Recipe = replace(
    RECIPES["glm4moe"],
    neurons=64,
    experts=8,
    shared=192,
    config=RECIPES["glm4moe"].config
    | {"n_routed_experts": 8, "moe_intermediate_size": 64, "intermediate_size": 160, "n_shared_experts": 3},
)
GEMMA4: Recipe = replace(
    RECIPES["gemma4 moe"],
    neurons=64,
    shared=160,
    config=RECIPES["gemma4 moe"].config | {"moe_intermediate_size": 64, "intermediate_size": 160},
)
PROMPT = [5, 17, 40, 7, 300]
MOST = 12


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages of nobody else."""
    monkeypatch.setenv("NEURONPIPE_DATA", str(tmp_path / "data"))
    return tmp_path / "data" / "packages"


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """A file whose layers differ in the encoding of Down."""
    path = tmp_path / "mixture.gguf"
    write_gguf_counterpart(path, SHAPE, seed=5, preset="Q4_K_M")
    return path


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def test_a_mixture_starts_without_a_second_copy(shell: Shell, data: Path, mixture: Path) -> None:
    first = shell.call("run", mixture, "-p", "1 2 3", "-n", "4")
    assert first.code == 0, first.errors
    assert "its experts are read in place; converting the rest, once" in first.errors
    (package,) = data.iterdir()
    assert not (package / "bundles.bin").exists()
    assert folder_bytes(package) < 0.5 * mixture.stat().st_size
    again = shell.call("run", mixture, "-p", "1 2 3", "-n", "4")
    assert again.out == first.out
    assert "converting" not in again.errors
    inspected = shell.json("inspect", mixture)
    assert inspected["source_experts"]["files"][0]["path"] == str(mixture)
    shown = shell.call("inspect", mixture).out
    assert "Experts are read in place" in shown
    assert "down  q6k in memory; stored as Q" in shown


def test_any_memory_and_any_number_of_workers_says_the_same(shell: Shell, data: Path, mixture: Path) -> None:
    answers = []
    for share, workers in (("100%", "1"), ("40%", "2"), ("15%", "1")):
        with shell.up(mixture, "--ffn-resident", share, "--workers", workers) as run:
            asked = [run.ask(PROMPT * times, MOST) for times in (1, 30)]
            answers.append([each["token_ids"] for each in asked])
            assert (asked[-1]["flash"]["reads"] > 0) == (share != "100%")
    assert answers[0] == answers[1] == answers[2]


def test_a_loader_that_dies_or_is_swapped_changes_no_token(shell: Shell, data: Path, mixture: Path) -> None:
    with shell.up(mixture, "--ffn-resident", "20%") as run:
        expected = run.ask(PROMPT, MOST)["token_ids"]
        os.kill(run.pid("loader"), signal.SIGKILL)
        assert run.ask(PROMPT, MOST)["token_ids"] == expected
        for process in ("loader", "decode.0"):
            assert shell.call("swap", process, "--run", run.path).code == 0
            assert run.ask(PROMPT, MOST)["token_ids"] == expected


@pytest.mark.parametrize(
    ("recipe", "encoding", "tensors_of_part"),
    [
        (RECIPE, "Q4_0", 0),
        (RECIPES["gpt-oss"], "MXFP4", 0),
        (GEMMA4, "Q8_0", 0),  # gate and up of all experts in one tensor
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                (RECIPE, "Q8_0", 0),
                (RECIPE, "Q8_0", 9),
                (RECIPE, "Q5_0", 0),
                (RECIPES["gpt-oss"], "Q8_0", 0),
                (GLM, "Q8_0", 0),
                (GLM, "Q4_0", 7),
                (GEMMA4, "Q4_0", 9),
            )
        ),
    ],
)
def test_logits_agree_with_the_stored_weights(
    shell: Shell, data: Path, tmp_path: Path, recipe: Recipe, encoding: str, tensors_of_part: int
) -> None:
    by_name = {"qwen3moe": METADATA, "glm4moe": GLM_METADATA, "gemma4 moe": gemma4_keys(GEMMA4)}
    metadata = by_name.get(recipe.name, GPT_OSS_METADATA)
    path = write_gguf(tmp_path / "m.gguf", recipe, encoding, metadata=metadata, tensors_of_part=tensors_of_part)
    text = tokens(recipe, 100)
    with shell.up(path, "--ffn-resident", "40%") as run, attach(run.path) as client:
        package = Package.open(next(data.iterdir()))
        assert package.manifest.source_experts is not None
        assert read_plan(run.path / PLAN_FILE).compute.prefill_chunk_tokens > PARTIAL_TOKENS
        for way in ("decode", "prefill"):
            out = shell.folder / f"{way}.npy"
            with stored_logits(out, RunDirectory(run.path), package, len(text)) as keep:
                score(client, text, window_tokens=len(text), path=way, keep=keep)
    expected = ReferenceEngine(package).run(text).logits
    logits = np.load(shell.folder / "decode.npy")
    assert np.array_equal(logits, np.load(shell.folder / "prefill.npy"))
    errors = np.sqrt(np.square(logits - expected).mean(axis=1) / np.square(expected).mean())
    assert np.median(errors) < 0.02  # a token whose experts were nearly as likely as others may go to those


def test_a_file_that_changes_gives_no_token_more(shell: Shell, data: Path, mixture: Path) -> None:
    with shell.up(mixture, "--ffn-resident", "20%") as run:
        run.ask(PROMPT, MOST)
        mixture.write_bytes(mixture.read_bytes())  # the same bytes: the time of modification tells
        with pytest.raises(UserError, match=r"mixture\.gguf: has changed since a package was made of it"):
            run.ask([9, *PROMPT], 40)
        assert run.status().ready
    (package,) = data.iterdir()
    assert "has changed since" in shell.refused("run", package, "-p", "1 2", "-n", "2")
    anew = shell.call("run", mixture, "-p", "1 2", "-n", "2")
    assert anew.code == 0, anew.errors
    assert "the model has changed" in anew.errors


def test_a_file_that_went_away_is_named(shell: Shell, data: Path, mixture: Path) -> None:
    assert shell.call("run", mixture, "-p", "1 2", "-n", "2").code == 0
    (package,) = data.iterdir()
    mixture.rename(mixture.with_suffix(".elsewhere"))
    said = shell.refused("run", package, "-p", "1 2", "-n", "2")
    assert f"{mixture}: cannot be read" in said


def test_a_package_made_by_request_takes_the_place_of_the_one_made_unasked(
    shell: Shell, data: Path, mixture: Path
) -> None:
    assert shell.call("run", mixture, "-p", "1 2", "-n", "2").code == 0
    done = shell.call("convert", mixture)
    assert done.code == 0, done.errors
    (package,) = data.iterdir()
    assert (package / "bundles.bin").exists()
    assert shell.json("inspect", mixture)["source_experts"] is None
    mixture.unlink()
    assert shell.call("run", package, "-p", "1 2", "-n", "2").code == 0


def test_an_encoding_that_is_not_computed_with_is_copied_and_said(shell: Shell, data: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", RECIPE, "F16", metadata=METADATA, architecture="qwen3moe")
    done = shell.call("run", path, "-p", "the rain", "-n", "2")
    assert done.code == 0, done.errors
    assert (
        "experts are copied, not read in place: experts in F16 are not computed with as they are stored" in done.errors
    )
    (package,) = data.iterdir()
    assert (package / "bundles.bin").exists()


def test_what_needs_neurons_by_themselves_says_how_to_get_them(shell: Shell, data: Path, mixture: Path) -> None:
    assert shell.call("run", mixture, "-p", "1 2", "-n", "2").code == 0
    (package,) = data.iterdir()
    said = shell.refused("profile", package, "--reorder")
    assert f"neuronpipe convert {mixture}" in said
