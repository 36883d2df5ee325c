"""gpt-oss: each of its mechanisms counts, and published checkpoints in MXFP4 are read exactly."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neuronpipe.plans.convert.checkpoint import Options
from neuronpipe.plans.convert.conversion import convert, open_checkpoint
from neuronpipe.plans.models.spec import LayerKind
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.reference.engine import ReferenceEngine
from neuronpipe.plans.reference.weights import CheckpointWeights
from neuronpipe.protocol.errors import UserError

from tests.conformance.checkpoints import RECIPES, Array, tensors, tokens, write_checkpoint, write_safetensors

RECIPE = RECIPES["gpt-oss"]
GOLDEN = np.load(Path(__file__).parent / "golden" / "logits.npz")["gpt-oss"]
VALUES = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
ABLATIONS: dict[str, dict[str, Any]] = {
    "sinks": {"attention_sinks": False},
    "biases of experts": {"ffn_bias": False},
    "the bias of the router": {"router_bias": False},
    "the bias of attention's output": {"output_bias": False},
    "the limit of gate and up": {"activation_limit": 1e6},
    "windows": {"layer_kinds": (LayerKind(4),)},
    "yarn's factor on scores": {"attention_scale": 1.0},
}


@pytest.mark.parametrize("mechanism", ABLATIONS)
def test_logits_without_a_mechanism_are_others(mechanism: str, converted: Callable[[str, str], Package]) -> None:
    engine = ReferenceEngine(converted("gpt-oss", "f16"))
    engine._model = dataclasses.replace(engine._model, **ABLATIONS[mechanism])
    logits = engine.run(tokens(RECIPE)).logits
    assert np.abs(logits - GOLDEN).max() > 0.05 * GOLDEN.std()


def mxfp4_checkpoint(folder: Path, recipe: Any = RECIPE, **changes: Any) -> tuple[Path, dict[str, Array]]:
    """A checkpoint whose experts have random blocks, and the weights [experts, rows, columns] of each tensor."""
    random, weights = np.random.default_rng(4), {}
    write_checkpoint(folder, recipe)
    stored: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, values in tensors(recipe):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = ("F32", values.shape, values.tobytes())
            continue
        experts, columns, rows = values.shape
        blocks = random.integers(0, 256, (experts, rows, columns // 32, 16), dtype=np.uint8)
        exponents = random.integers(120, 124, (experts, rows, columns // 32), dtype=np.uint8)
        codes = np.stack((blocks & 15, blocks >> 4), axis=-1).reshape(experts, rows, columns // 32, 32)
        scales = np.exp2(exponents.astype(np.float32) - 127)[..., None]
        weights[name] = (VALUES[codes] * scales).reshape(experts, rows, columns)
        stored[f"{name}_blocks"] = ("U8", blocks.shape, blocks.tobytes())
        stored[f"{name}_scales"] = ("U8", exponents.shape, exponents.tobytes())
    write_safetensors(folder / "model.safetensors", stored)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder, weights


def test_experts_in_mxfp4_have_the_stored_values(tmp_path: Path) -> None:
    source, weights = mxfp4_checkpoint(tmp_path / "model")
    with open_checkpoint(source, Options()) as checkpoint:
        read = CheckpointWeights(checkpoint)
        for layer in range(RECIPE.layers):
            joined = weights[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
            down = weights[f"model.layers.{layer}.mlp.experts.down_proj"]
            for expert in range(RECIPE.experts):
                gate, up, by_neuron = read.neurons(layer, expert)
                assert np.array_equal(gate, joined[expert, 0::2])
                assert np.array_equal(up, joined[expert, 1::2])
                assert np.array_equal(by_neuron, down[expert].T)


def test_a_package_of_it_has_the_logits_of_the_checkpoint(tmp_path: Path) -> None:
    source, _ = mxfp4_checkpoint(tmp_path / "model")
    package = convert(source, tmp_path / "package")
    assert package.manifest.quantization == "mxfp4"
    with open_checkpoint(source, Options()) as checkpoint:
        expected = ReferenceEngine(CheckpointWeights(checkpoint)).run(tokens(RECIPE)).logits
    logits = ReferenceEngine(package).run(tokens(RECIPE)).logits
    errors = np.sqrt(np.square(logits - expected).mean(axis=1) / np.square(expected).mean())
    assert np.median(errors) < 0.05  # a token whose experts were nearly as likely as others may go to those


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"swiglu_alpha": 1.5}, "swiglu_alpha: 1.5 is not supported"),
        ({"swiglu_limit": 0.0}, "activation_limit: 0.0 does not go with"),
        ({"attention_bias": False}, "attention_bias: is false"),
        ({"hidden_act": "relu"}, "hidden_act: is not silu"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized checkpoints are not supported"),
        ({"num_local_experts": 5}, "has shape"),
        ({"intermediate_size": 96}, r"gate_up_proj_blocks: is U8 with shape"),
    ],
)
def test_a_configuration_that_is_not_supported_is_refused_by_its_key(
    change: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    source, _ = mxfp4_checkpoint(tmp_path / "model", **change)
    with pytest.raises(UserError, match=complaint):
        convert(source, tmp_path / "package")
    assert not (tmp_path / "package").exists()
