"""Mistral Small 3.1 and Ministral 3: beside a vision tower, with queries that grow with the position, and in GGUF
files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neuronpipe.plans.convert.conversion import convert
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.reference.engine import ReferenceEngine
from neuronpipe.protocol.errors import UserError

from tests.conformance.checkpoints import RECIPES, tensors, tokens, write_checkpoint, write_safetensors
from tests.conformance.gguf_files import write_gguf
from tests.conformance.test_gguf_conversion import same_weights
from tests.conformance.test_golden_logits import GOLDEN

RECIPE = RECIPES["ministral3"]
GGUF_KEYS: dict[str, Any] = {
    "mistral3.rope.scaling.yarn_beta_slow": 1.0,
    "mistral3.rope.scaling.yarn_log_multiplier": 1.0,
    "mistral3.attention.temperature_scale": 0.1,
}
"""What llama.cpp's converter writes of this class alone."""


def write_ministral(path: Path, **changes: Any) -> Path:
    """Write the recipe as a GGUF file with the whole context. changes: by keys without `mistral3.`; None leaves one
    out."""
    keys = GGUF_KEYS | {f"mistral3.{key}": value for key, value in changes.items()}
    present = {key: value for key, value in keys.items() if value is not None}
    return write_gguf(path, replace(RECIPE, context_tokens=1024), "BF16", metadata=present)


def configure(source: Path, **changes: object) -> None:
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("is_newer", [False, True])
def test_the_language_model_beside_a_vision_tower_is_read_alone(
    is_newer: bool, tmp_path: Path, converted: Callable[[str, str], Package]
) -> None:
    def placed(name: str) -> str:
        if not is_newer:
            return f"language_model.{name}"
        return name.replace("model.", "model.language_model.", 1)

    source = write_checkpoint(tmp_path / "model", RECIPE)
    stored = {placed(name): ("F32", value.shape, value.tobytes()) for name, value in tensors(RECIPE)}
    for tensor in ("vision_tower.patch_conv.weight", "multi_modal_projector.linear_1.weight"):
        stored[f"model.{tensor}" if is_newer else tensor] = ("F32", (2,), np.ones(2, np.float32).tobytes())
    write_safetensors(source / "model.safetensors", stored)
    text = json.loads((source / "config.json").read_text())
    for key in ("architectures", "tie_word_embeddings"):
        del text[key]
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "vision_config": {}}
    (source / "config.json").write_text(json.dumps({**outer, "text_config": text}))
    package = convert(source, tmp_path / "package", quantization="f16")
    assert package.manifest.model == converted("ministral3", "f16").manifest.model
    assert np.abs(ReferenceEngine(package).run(tokens(RECIPE)).logits - GOLDEN["ministral3"]).max() < 1e-3


def test_its_queries_grow_behind_the_original_context(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "model", RECIPE)
    model = convert(source, tmp_path / "package", quantization="f16").manifest.model
    assert (model.context_tokens, model.query_growth, model.query_growth_tokens) == (1024, 0.1, 128)
    theta = {"rope_theta": 1_000_000.0}
    configure(source, rope_parameters=None, rope_scaling=RECIPE.config["rope_parameters"], **theta)  # an older spelling
    assert convert(source, tmp_path / "older", quantization="f16").manifest.model == model
    scaling = {**RECIPE.config["rope_parameters"], "llama_4_scaling_beta": 0.0}
    configure(source, rope_parameters=scaling, rope_scaling=None)
    plain = convert(source, tmp_path / "plain", quantization="f16").manifest.model
    assert plain == replace(model, query_growth=0.0, query_growth_tokens=0)


def test_logits_behind_the_original_context_need_the_factor(converted: Callable[[str, str], Package]) -> None:
    engine, golden = ReferenceEngine(converted("ministral3 long", "f16")), GOLDEN["ministral3 long"]
    engine._model = replace(engine._model, query_growth=0.0, query_growth_tokens=0)
    wrong = np.abs(engine.run(tokens(RECIPES["ministral3 long"])).logits - golden)
    assert wrong[:8].max() < 1e-3
    assert wrong[8:].max() > 0.05 * golden.std()


def test_logits_without_yarn_are_others(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "model", RECIPE)
    configure(source, rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0})
    logits = ReferenceEngine(convert(source, tmp_path / "package", quantization="f16")).run(tokens(RECIPE)).logits
    assert np.abs(logits - GOLDEN["ministral3"]).max() > 0.05 * GOLDEN["ministral3"].std()


def test_a_gguf_file_is_the_same_package(tmp_path: Path, converted: Callable[[str, str], Package]) -> None:
    package, expected = (
        convert(write_ministral(tmp_path / "m.gguf"), tmp_path / "p", quantization="f16"),
        converted("ministral3", "f16"),
    )
    assert same_weights(package, expected)
    epsilon, growth = (float(np.float32(value)) for value in (1e-5, 0.1))
    told = replace(expected.manifest.model, norm_epsilon=epsilon, query_growth=growth)
    assert package.manifest.model == told
    assert np.abs(ReferenceEngine(package).run(tokens(RECIPE)).logits - GOLDEN["ministral3"]).max() < 1e-3


@pytest.mark.parametrize(
    ("changes", "query_growth_tokens", "attention_scale"),
    [
        ({"attention.temperature_scale": 0.0}, 0, 1.0),
        ({"attention.temperature_length": 64}, 64, 1.0),
        ({"rope.scaling.yarn_log_multiplier": 0.0}, 128, (0.1 * np.log(8) + 1) ** 2),
        ({"rope.scaling.yarn_log_multiplier": 0.5}, 128, ((0.1 * np.log(8) + 1) / (0.05 * np.log(8) + 1)) ** 2),
        ({"rope.scaling.yarn_log_multiplier": None}, 128, (0.1 * np.log(8) + 1) ** 2),
    ],
)
def test_a_gguf_file_says_the_growth_of_queries_and_yarns_factor(
    changes: dict[str, Any], query_growth_tokens: int, attention_scale: float, tmp_path: Path
) -> None:
    model = convert(write_ministral(tmp_path / "m.gguf", **changes), tmp_path / "p").manifest.model
    assert model.query_growth_tokens == query_growth_tokens
    assert model.attention_scale == pytest.approx(attention_scale)


def test_a_gguf_file_that_cannot_be_read_is_refused_by_its_key(tmp_path: Path) -> None:
    source = tmp_path / "m.gguf"
    write_gguf(source, replace(RECIPE, config={}), "BF16", metadata=GGUF_KEYS)  # without YaRN
    with pytest.raises(UserError, match=r"m\.gguf: mistral3\.rope\.scaling\.original_context_length: missing"):
        convert(source, tmp_path / "p")
    write_ministral(source, **{"rope.scaling.yarn_log_multiplier": -1.0})
    with pytest.raises(UserError, match=r"m\.gguf: mistral3\.rope\.scaling\.yarn_log_multiplier: "):
        convert(source, tmp_path / "p")
