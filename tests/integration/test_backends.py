"""Who computes: backends by name, their options, their numerics, and what of one may stand for another."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from neuronpipe.launch.client import attach
from neuronpipe.launch.conformance.agreement import MAX_DIFFERENCE
from neuronpipe.launch.scoring import score, stored_logits
from neuronpipe.native import ffi, lib
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import read_plan
from neuronpipe.protocol.run_directory import RunDirectory

from tests.conformance.checkpoints import RECIPES, tokens
from tests.conformance.specs import SPECS, give_thresholds, write_package
from tests.pipeline import SLOWER, Shell

SETS = ffi.string(lib.np_isa_names()).decode().split(",")
NUMPY = "tests.conformance.numpy_backend:NumpyPrefill"
HERE = Path(__file__).resolve().parents[2]
Converted = Callable[..., Package]

two_sets = pytest.mark.skipif(len(SETS) < 2, reason="this processor has one set of kernels")


def numerics(run_status: object) -> dict[str, str]:
    return {f"{one.role}.{one.index}": one.numerics for one in run_status.processes if one.numerics}  # type: ignore[attr-defined]


@two_sets
def test_a_plan_names_the_backend_of_a_role_and_status_its_numerics(shell: Shell, converted: Converted) -> None:
    package = converted("relu2", "q8").path
    plan = shell.folder / "plan.json"
    options = ("--workers", "2", "--backend", f"decode=cpu:{SETS[-1]}")
    assert shell.call("plan", package, *options, "-o", plan).code == 0
    with shell.up(package, "--plan", plan) as run:
        assert numerics(run.status()) == {
            "prefill.0": f"cpu:{SETS[0]}",
            "decode.0": f"cpu:{SETS[-1]}",
            "decode.1": f"cpu:{SETS[-1]}",
        }
        assert f"cpu:{SETS[-1]}" in shell.call("status", "--run", run.path).out


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        ("decode=gpu", "backend 'gpu': the backends are cpu, onnx"),
        ("prefill=cpu:sse9", f"backend cpu:sse9: this machine has {', '.join(SETS)}"),
        ("cache=cpu", "write decode=NAME, prefill=NAME or accelerator=NAME"),
        ("decode", "write decode=NAME, prefill=NAME or accelerator=NAME"),
    ],
)
def test_a_backend_that_there_is_not_is_refused_before_the_run(
    shell: Shell, converted: Converted, backend: str, why: str
) -> None:
    assert why in shell.refused("up", converted("relu2", "q8").path, "--backend", backend)


def test_prompts_by_a_neural_processors_runtime_agree_with_the_native_engine(shell: Shell, tmp_path: Path) -> None:
    """Through the whole pipeline, with the runtime's own CPU provider in the place of a processor; status names it."""
    pytest.importorskip("onnxruntime")
    text = np.random.default_rng(3).integers(0, SPECS["scaled"].vocabulary, 70).tolist()
    package = write_package(tmp_path / "package", SPECS["scaled"], "q8")
    options = ("--backend", "prefill=onnx:cpu", "--workers", "2")
    assert 0 < disagreement(shell, package, text, *options, use=()) < MAX_DIFFERENCE
    with shell.up(package.path, *options) as run:
        assert numerics(run.status())["prefill.0"] == f"onnx-cpu+cpu:{SETS[0]}"


@pytest.mark.parametrize(
    ("recipe", "quantization"),
    [
        ("qwen3", "f16"),
        ("awkward", "q4"),
        *(
            pytest.param(*one, marks=pytest.mark.nightly)
            for one in (("relu2", "f16"), ("opt", "f16"), ("awkward", "q8"))
        ),
    ],
)
def test_prompts_by_numpy_agree_with_the_native_engine(
    shell: Shell, converted: Converted, recipe: str, quantization: str
) -> None:
    """Through the whole pipeline: decode workers compute natively, the prefill worker by numpy, the same text."""
    error = disagreement(shell, converted(recipe, quantization), tokens(RECIPES[recipe]))
    print(f"{recipe} {quantization}: {error:.5f} of the spread at most")
    assert 0 < error < (0.0005 if quantization == "f16" else MAX_DIFFERENCE)


def test_silent_neurons_are_silent_in_another_backend(shell: Shell, tmp_path: Path) -> None:
    few = replace(SPECS["qwen3"], neurons=48)
    text = np.random.default_rng(3).integers(0, few.vocabulary, 70).tolist()
    package, _ = give_thresholds(write_package(tmp_path / "package", few, "f16"), text)
    assert 0 < disagreement(shell, package, text, "--mode", "thresholded") < 0.0005


def disagreement(
    shell: Shell,
    package: Package,
    text: list[int],
    *options: str,
    use: tuple[str, ...] = ("--use", f"prefill={NUMPY}"),
) -> float:
    """How far the logits of decode, computed natively, are at most from those of another prefill worker, by numpy
    unless told otherwise, in units of their spread."""
    rows = {}
    with shell.up(package.path, *use, *options, cwd=HERE) as run, attach(run.path) as client:
        context_tokens = read_plan(run.path / "plan.json").compute.context_tokens
        for path in ("decode", "prefill"):
            out = shell.folder / f"{path}.npy"
            with stored_logits(out, RunDirectory(run.path), package, len(text)) as keep:
                nll = score(client, text, window_tokens=context_tokens, path=path, keep=keep)
            assert np.allclose(score(client, text, window_tokens=context_tokens, path=path), nll, rtol=1e-4, atol=1e-5)
            rows[path] = np.load(out)
    error = np.sqrt(np.mean(np.square(rows["decode"] - rows["prefill"]), axis=1)) / rows["decode"].std(axis=1)
    return float(error.max())


def test_a_swap_to_other_numerics_says_how_near_it_is_and_shares_nothing_across(
    shell: Shell, converted: Converted
) -> None:
    package = converted("relu2", "f16").path
    prompt = list(range(1, 21))
    with shell.up(package, "--sequences", "2") as run:
        first = run.ask(prompt, 6, share_prefix=True)
        assert run.ask(prompt, 6, share_prefix=True)["cached_tokens"] == len(prompt) - 1
        words = ("swap", "prefill", "--use", NUMPY, "--run", run.path, "--patience", f"{60 * SLOWER:g}", "--json")
        done = shell.call(*words, cwd=HERE)
        assert done.code == 0, done.errors
        agreement = json.loads(done.out)["agreement"]
        assert agreement["numerics"] == {"prefill": [f"cpu:{SETS[0]}", "numpy-f32"]}
        assert 0 < agreement["difference"] < MAX_DIFFERENCE
        assert agreement["same_top"] == agreement["rows"]
        alone = run.ask(prompt, 6, share_prefix=True)
        assert alone["cached_tokens"] == 0, "the native engine had computed that"
        assert len(alone["token_ids"]) == len(first["token_ids"])
        again = run.ask(prompt + alone["token_ids"][:3], 6, share_prefix=True)
        assert again["cached_tokens"] == len(prompt), "numpy computed the prompt, the native engine what followed"


def test_a_backend_that_is_beyond_the_tolerance_is_refused(shell: Shell, converted: Converted) -> None:
    with shell.up(converted("relu2", "f16").path) as run:
        wrong = NUMPY.replace("NumpyPrefill", "WrongPrefill")
        words = ("swap", "prefill", "--use", wrong, "--run", run.path, "--patience", f"{60 * SLOWER:g}")
        done = shell.call(*words, cwd=HERE)
        assert done.code == 2
        assert "computes something else: prefill computes in numpy-f32" in done.errors
        assert numerics(run.status())["prefill.0"] == f"cpu:{SETS[0]}"


def test_a_backend_that_does_not_support_the_phase_ends_the_run_with_the_reason(
    shell: Shell, converted: Converted
) -> None:
    (shell.folder / "experiment.py").write_text(
        "from neuronpipe.services.worker.decode import DecodeService\n"
        "from tests.conformance.numpy_backend import NumpyBackend\n"
        "class Numpy(DecodeService):\n"
        "    def backend(self, job):\n"
        "        return NumpyBackend()\n"
    )
    words = ("up", converted("relu2", "f16").path, "--workers", "1", "--use", "decode=experiment:Numpy")
    done = shell.call(*words, cwd=shell.folder, environment={"PYTHONPATH": str(HERE)})
    assert done.code == 2
    assert "decode.0: numpy computes prompts of dense models only" in done.errors


@two_sets
def test_one_of_two_decode_workers_cannot_change_its_numerics_alone(shell: Shell, converted: Converted) -> None:
    (shell.folder / "experiment.py").write_text(
        "from neuronpipe.services.worker.decode import DecodeService\n"
        "from neuronpipe.services.worker.cpu import CpuBackend\n"
        "class Other(DecodeService):\n"
        "    def backend(self, job):\n"
        f"        return CpuBackend({SETS[-1]!r})\n"
    )
    with shell.up(converted("relu2", "q8").path, "--workers", "2") as run:
        words = ("--use", "experiment:Other", "--run", run.path, "--patience", f"{30 * SLOWER:g}")
        done = shell.call("swap", "decode.1", *words, cwd=shell.folder)
        assert done.code == 2
        assert "replace all of them at once, `neuronpipe swap decode`" in done.errors
        done = shell.call("swap", "decode", *words, cwd=shell.folder)
        assert done.code == 0, done.errors
        assert f"decode computes in cpu:{SETS[-1]}, before in cpu:{SETS[0]}" in done.out
        assert set(numerics(run.status()).values()) == {f"cpu:{SETS[0]}", f"cpu:{SETS[-1]}"}
