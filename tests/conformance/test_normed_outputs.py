"""Gemma and OLMo: each of their mechanisms counts, and checkpoints with a vision tower are read without it."""

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
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.reference.engine import ReferenceEngine
from neuronpipe.protocol.errors import UserError
from neuronpipe.services.offload.gpu.backend import OpenClBackend
from neuronpipe.services.offload.npu.backend import refusal

from tests.conformance.checkpoints import RECIPES, tensors, tokens, write_checkpoint, write_safetensors

GOLDEN = np.load(Path(__file__).parent / "golden" / "logits.npz")


Changes = Callable[[ModelSpec], dict[str, Any]]


def _kinds(**changes: Any) -> Changes:
    def of(model: ModelSpec) -> dict[str, Any]:
        kinds = tuple(dataclasses.replace(kind, **changes) for kind in model.layer_kinds)
        has_local = any(kind.local_positions for kind in kinds)
        return {"layer_kinds": kinds, "local_attention_scale": model.local_attention_scale if has_local else 1.0}

    return of


def _fields(**changes: Any) -> Changes:
    return lambda model: changes


ABLATIONS: dict[tuple[str, str], Changes] = {
    ("gemma2", "norms of outputs"): _fields(norms="before"),
    ("gemma2", "norms of inputs"): _fields(norms="after"),
    ("gemma2", "the cap of scores"): _fields(score_cap=0.0),
    ("gemma2", "the cap of logits"): _fields(logit_cap=0.0),
    ("gemma2", "the factor of scores"): _fields(attention_scale=1.0),
    ("gemma2", "the factor of embeddings"): _fields(embedding_scale=1.0),
    ("gemma2", "gelu"): _fields(activation="silu"),
    ("gemma2", "windows"): _kinds(window_tokens=0),
    ("gemma3", "norms of heads"): _fields(head_norm=False),
    ("gemma3", "the table of layers with windows"): _kinds(local_positions=False),
    ("gemma3", "windows"): _kinds(window_tokens=0),
    ("olmo2", "norms of all heads"): _fields(joint_norm=False),
    ("olmo3", "the table of layers with windows"): _kinds(local_positions=False),
    ("olmo3", "the factor of scores of layers without windows"): _fields(attention_scale=1.0),
    ("olmo3", "the factor of scores of layers with windows"): lambda model: {
        "local_attention_scale": model.attention_scale
    },
}


@pytest.mark.parametrize(("name", "mechanism"), ABLATIONS)
def test_logits_without_a_mechanism_are_others(
    name: str, mechanism: str, converted: Callable[[str, str], Package]
) -> None:
    engine = ReferenceEngine(converted(name, "f16"))
    engine._model = dataclasses.replace(engine._model, **ABLATIONS[name, mechanism](engine._model))
    logits = engine.run(tokens(RECIPES[name])).logits
    assert np.abs(logits - GOLDEN[name]).max() > 0.05 * GOLDEN[name].std()


@pytest.mark.parametrize("name", ["olmo2", "olmo3", "gemma3"])
def test_logits_without_norms_of_outputs_are_others(name: str, converted: Callable[[str, str], Package]) -> None:
    engine = ReferenceEngine(converted(name, "f16"))
    engine._output = lambda norm, change: change  # type: ignore[method-assign]
    logits = engine.run(tokens(RECIPES[name])).logits
    assert np.abs(logits - GOLDEN[name]).max() > 0.05 * GOLDEN[name].std()


def test_a_language_model_beside_a_vision_tower_is_read_alone(
    tmp_path: Path, converted: Callable[[str, str], Package]
) -> None:
    """As published: the sizes that are the class's defaults are missing, and end tokens lie outside."""
    recipe = RECIPES["gemma3"]
    source = write_checkpoint(tmp_path / "model", recipe)
    stored = {f"language_model.{name}": ("F32", value.shape, value.tobytes()) for name, value in tensors(recipe)}
    extra = np.ones(2, np.float32).tobytes()
    for name in ("vision_tower.vision_model.post_layernorm.bias", "multi_modal_projector.mm_soft_emb_norm.weight"):
        stored[name] = ("F32", (2,), extra)
    write_safetensors(source / "model.safetensors", stored)
    config = json.loads((source / "config.json").read_text())
    outer = {"eos_token_id": [1, 106], "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    for name in ("eos_token_id", "tie_word_embeddings", "architectures", "hidden_activation"):
        del config[name]
    (source / "config.json").write_text(json.dumps({**outer, "vision_config": {}, "text_config": config}))
    package = convert(source, tmp_path / "package", quantization="f16")
    assert package.manifest.model == converted("gemma3", "f16").manifest.model
    assert package.manifest.end_tokens == (1, 106)
    assert np.abs(ReferenceEngine(package).run(tokens(recipe)).logits - GOLDEN["gemma3"]).max() < 1e-3


def test_layers_of_a_kind_have_its_window(tmp_path: Path) -> None:
    for name, windows in (("gemma2", (9, 0, 9)), ("gemma3", (9, 9, 0, 9)), ("olmo3", (9, 9, 9, 0, 9))):
        source = write_checkpoint(tmp_path / name, RECIPES[name])
        with open_checkpoint(source, Options()) as checkpoint:
            assert checkpoint.model.windows_tokens == windows


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: is true"),
        ("gemma2", {"attention_bias": True}, "attention_bias: is true"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation: 'gelu' is not supported"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("gemma3", {"sliding_window": None}, "sliding_window"),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma3", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters: is to have full_attention and"),
        ("olmo3", {"rope_parameters": None}, "rope_theta: does not say which base"),
        ("olmo2", {"attention_bias": True}, "attention_bias: is true"),
    ],
)
def test_a_configuration_that_is_not_supported_is_refused_by_its_key(
    name: str, change: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "model", RECIPES[name])
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=complaint):
        convert(source, tmp_path / "package")
    assert not (tmp_path / "package").exists()


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2", "olmo3"])
def test_accelerators_and_neural_processors_refuse_such_models(
    name: str, converted: Callable[[str, str], Package]
) -> None:
    """Also with an activation that they compute."""
    manifest = converted(name, "q8").manifest
    assert "this model has" in (OpenClBackend().supports(manifest, "accelerator") or "")
    sparse = dataclasses.replace(manifest, model=dataclasses.replace(manifest.model, activation="relu"))
    assert "norms of outputs" in (OpenClBackend().supports(sparse, "accelerator") or "")
    assert "norms of outputs" in (refusal(sparse) or "")
