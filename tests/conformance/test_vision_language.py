"""The text of models that see. Golden logits test the names of newer checkpoints; here are the others, and GGUF."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neuronpipe.plans.convert import convert
from neuronpipe.plans.convert.conversion import Encoded
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError

from tests.conformance.checkpoints import RECIPES, Recipe, config, tensors, write_checkpoint, write_safetensors
from tests.conformance.dense_tensors import llama_tensors
from tests.conformance.gguf_files import write_gguf
from tests.conformance.random_tensors import bfloat16_bits
from tests.conformance.test_gguf_conversion import same_weights
from tests.conformance.vision_language import LANGUAGE_CLASSES

Converted = Callable[[str, str], Package]
TOWER = ("BF16", (4,), bytes(8))  # a tensor of what sees, which is left out


def language_recipe(name: str) -> Recipe:
    """The language model of a recipe, as the class that has nothing else computes it."""
    return replace(RECIPES[name], architecture=LANGUAGE_CLASSES[RECIPES[name].architecture])


@pytest.mark.parametrize(
    ("name", "architecture", "metadata"),
    [
        ("qwen2.5 vl", "qwen2vl", {"rope.dimension_sections": [4, 4, 4, 0]}),
        ("qwen3 vl", "qwen3vl", {"rope.dimension_sections": [6, 5, 5, 0], "n_deepstack_layers": 1}),
        (
            "qwen3 vl moe",
            "qwen3vlmoe",
            {
                "rope.dimension_sections": [6, 5, 5, 0],
                "n_deepstack_layers": 1,
                "expert_count": 9,
                "expert_used_count": 3,
                "expert_feed_forward_length": 64,
            },
        ),
    ],
)
def test_a_gguf_file_is_the_same_package(
    name: str, architecture: str, metadata: dict[str, Any], tmp_path: Path, converted: Converted
) -> None:
    recipe, expected = language_recipe(name), converted(name, "q8")
    keys = {f"{architecture}.{key}": value for key, value in metadata.items()}
    source = write_gguf(tmp_path / "m.gguf", recipe, recipe.dtype, architecture=architecture, metadata=keys)
    package = convert(source, tmp_path / "p", quantization="q8")
    assert same_weights(package, expected)
    told = replace(expected.manifest.model, norm_epsilon=float(np.float32(1e-5)), family=package.manifest.model.family)
    assert package.manifest.model == told


def test_a_file_as_qwen2_vl_was_published_has_no_part_for_language(tmp_path: Path, converted: Converted) -> None:
    """Its config.json has the keys of a language model beside those of the tower, and its tensors their usual names."""
    recipe = replace(RECIPES["qwen2.5 vl"], architecture="Qwen2VLForConditionalGeneration")
    source = write_checkpoint(tmp_path / "model", replace(recipe, architecture="Qwen2ForCausalLM"))
    text = json.loads((source / "config.json").read_text())
    changes = {"architectures": [recipe.architecture], "model_type": "qwen2_vl", "vision_config": {"depth": 1}}
    (source / "config.json").write_text(json.dumps({**text, **changes}))
    stored = {
        name: ("BF16", values.shape, bfloat16_bits(values).tobytes())
        for name, values in llama_tensors(language_recipe("qwen2.5 vl"))
    }
    write_safetensors(source / "model.safetensors", {**stored, "visual.merger.mlp.0.weight": TOWER})
    package, expected = convert(source, tmp_path / "p", quantization="f16"), converted("qwen2.5 vl", "f16")
    assert package.manifest.model == expected.manifest.model
    assert same_weights(package, expected)


def test_experts_one_by_one_are_the_same_package(tmp_path: Path, converted: Converted) -> None:
    """As FP8 checkpoints have them; the number of experts as transformers 5 writes it."""
    source = write_checkpoint(tmp_path / "model", RECIPES["qwen3 vl moe"])
    values = config(RECIPES["qwen3 vl moe"])
    values["text_config"]["num_local_experts"] = values["text_config"].pop("num_experts")
    (source / "config.json").write_text(json.dumps(values))
    one_by_one = {
        name.replace("model.", "model.language_model.", 1): ("BF16", array.shape, bfloat16_bits(array).tobytes())
        for name, array in llama_tensors(language_recipe("qwen3 vl moe"))
    }
    write_safetensors(source / "model.safetensors", {**one_by_one, "model.visual.merger.norm.weight": TOWER})
    package, expected = convert(source, tmp_path / "p", quantization="f16"), converted("qwen3 vl moe", "f16")
    assert package.manifest.model == expected.manifest.model
    assert same_weights(package, expected)


def test_converting_names_the_parts_that_are_left_out(tmp_path: Path) -> None:
    """A tower was left out without a word; what text needs, and vectors, are not named."""
    of_tower = {f"model.visual.blocks.{n}.attn.qkv.weight": np.ones((2, 4), np.float32) for n in range(2)}
    source = write_checkpoint(tmp_path / "model", RECIPES["qwen3 vl"], of_tower)
    reports: list[Encoded] = []
    convert(source, tmp_path / "p", quantization="q8", report=reports.append)
    assert reports[0].notes[-1] == "matrices are left out that computing text does not need: `visual` (2)"
    source = write_checkpoint(tmp_path / "text", RECIPES["qwen3"])
    convert(source, tmp_path / "q", quantization="q8", report=reports.append)
    assert not any("left out" in note for note in reports[1].notes)


def test_a_tensor_that_belongs_to_no_tower_is_refused(tmp_path: Path) -> None:
    recipe = RECIPES["qwen3 vl"]
    source = write_checkpoint(tmp_path / "model", recipe, {"model.hearing.weight": np.ones(4, np.float32)})
    with pytest.raises(UserError, match=r"model\.hearing\.weight"):
        convert(source, tmp_path / "p", quantization="q8")


def test_experts_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    recipe = RECIPES["qwen3 vl moe"]
    wrong = {
        name: np.ascontiguousarray(values.swapaxes(1, 2))
        for name, values in tensors(recipe)
        if name.endswith("1.mlp.experts.gate_up_proj")
    }
    source = write_checkpoint(tmp_path / "model", recipe, wrong)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.experts\.gate_up_proj: has shape \[9, 128, 96\]"):
        convert(source, tmp_path / "p", quantization="q8")
    assert not (tmp_path / "p").exists()
