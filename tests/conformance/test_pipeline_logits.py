"""The whole pipeline, processes and all, against logits that transformers computed, through both paths."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from neuronpipe.launch.client import attach
from neuronpipe.launch.scoring import score, stored_logits
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import read_plan
from neuronpipe.protocol.run_directory import RunDirectory

from tests.conformance.checkpoints import RECIPES, tokens
from tests.conformance.test_golden_logits import GOLDEN
from tests.pipeline import Shell

# int8 activations (1/127 of the largest of 32) add to the weights' own error, which test_golden_logits.py explains.
BOUNDS = {
    "f16": 0.0005,
    **dict.fromkeys(("q4", "iq4", "q4k", "q4h"), 0.36),
    **dict.fromkeys(("q5k", "q5h"), 0.2),
    "mxfp4": 0.5,
    "q6k": 0.1,
    "q8": 0.04,
}
# One of each kind of layer: gated or not, in parallel or not, biases, norms of heads, dense or a mixture of each order.
# The others differ in what conversion makes of them, which the golden logits test without a pipeline. The quantizations
# that are left to the night run in a pipeline in integration/test_same_tokens.py.
EVERY_TIME = {
    *((name, "f16") for name in ("qwen2", "qwen3", "opt", "falcon 7b", "mixtral", "smallthinker")),
    *(("awkward", quantization) for quantization in ("q4", "q4h", "q4k", "q6k", "q8")),
}
CASES = [
    pytest.param(*case, marks=() if case in EVERY_TIME else pytest.mark.nightly)
    for case in (*((name, "f16") for name in RECIPES), *(("awkward", name) for name in BOUNDS if name != "f16"))
]


@pytest.mark.parametrize(("name", "quantization"), CASES)
def test_logits_agree_with_transformers(
    name: str, quantization: str, converted: Callable[[str, str], Package], shell: Shell
) -> None:
    package, text = converted(name, quantization), tokens(RECIPES[name])
    with shell.up(package.path, "--ffn-resident", "70%", "--workers", "2") as run, attach(run.path) as client:
        made = read_plan(run.path / "plan.json")
        for path in ("decode", "prefill"):
            out = shell.folder / f"{path}.npy"
            with stored_logits(out, RunDirectory(run.path), package, len(text)) as keep:
                score(client, text, window_tokens=made.compute.context_tokens, path=path, keep=keep)
    logits = np.load(shell.folder / "decode.npy")
    assert np.array_equal(logits, np.load(shell.folder / "prefill.npy"))
    error = np.sqrt(np.square(logits - GOLDEN[name]).mean() / np.square(GOLDEN[name]).mean())
    print(f"{name} {quantization}: relative rms {error:.5f}, largest {np.abs(logits - GOLDEN[name]).max():.4f}")
    assert error < BOUNDS[quantization]
    if quantization == "f16":
        assert np.abs(logits - GOLDEN[name]).max() < 1e-2
