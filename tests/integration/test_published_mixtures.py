"""Small siblings of the mixtures that people have, through the whole pipeline: the text they must say is known."""

from __future__ import annotations

from pathlib import Path

import pytest
from neuronpipe.plans.lab.synth.shapes import SHAPES
from neuronpipe.plans.lab.synth.synthesize import synthesize

from tests.pipeline import Shell
from tests.unit.test_synth import four_layers


@pytest.mark.parametrize(
    "name",
    [
        "smallthinker-100m",
        "qwen3-moe-100m",
        "glm-moe-100m",
        "qwen3.5-moe-100m",
        "glm-flash-100m",
        "phi-moe-100m",
        "nemotron-3-100m",
        "granite-4-h-100m",
    ],
)
def test_a_mixture_walks_its_trajectory_with_a_third_of_its_neurons(name: str, shell: Shell, tmp_path: Path) -> None:
    package = synthesize(name, four_layers(SHAPES[name]), tmp_path / "package")
    assert package.manifest.workload is not None
    first, _ = package.manifest.workload.presets["pessimistic"]
    with shell.up(package.path, "--ffn-resident", "30%", "--context", "512") as run:
        for prompt_tokens in (2, 70):
            asked = run.ask(list(range(first, first + prompt_tokens)), 12)
            assert asked["token_ids"] == list(range(first + prompt_tokens, first + prompt_tokens + 12))
            assert asked["flash"]["reads"] > 0


def test_a_long_prompt_reads_only_what_is_absent(shell: Shell, tmp_path: Path) -> None:
    """Every layer evicted what the next prompt found absent then: prompts read every expert, resident or not."""
    package = synthesize("qwen3-moe-100m", four_layers(SHAPES["qwen3-moe-100m"]), tmp_path / "package")
    bank_bytes = package.manifest.clusters * package.manifest.layout.cluster_stride_bytes
    with shell.up(package.path, "--ffn-resident", "75%", "--context", "512") as run:
        read_bytes = [run.ask(list(range(n, n + 400)), 1)["flash"]["bytes"] for n in (0, 400, 800, 1200)]
    assert sum(read_bytes[1:]) < 0.7 * 3 * bank_bytes  # one alone depends on what the prompt before left resident
