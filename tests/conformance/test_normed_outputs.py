"""Gemma, OLMo and EXAONE: each of their mechanisms counts, and checkpoints with a vision tower are read without it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
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


def _tables_of_one_width(model: ModelSpec) -> dict[str, Any]:
    """The table of layers without windows is too long for the others: they are not rotated."""
    kinds = (dataclasses.replace(kind, rotary=not kind.local_positions) for kind in model.layer_kinds)
    return {"layer_kinds": tuple(kinds)}


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
    ("gemma4", "norms of values"): _fields(value_norm=False),
    ("gemma4", "the table of layers with windows"): _tables_of_one_width,
    ("gemma4", "layer scalars"): _fields(layer_scales=False),
    ("gemma4", "the factor of scores of layers without windows"): _fields(attention_scale=1.0),
    ("gemma4", "the factor of scores of layers with windows"): _fields(local_attention_scale=1.0),
    ("gemma4", "the cap of logits"): _fields(logit_cap=0.0),
    ("gemma4", "the factor of embeddings"): _fields(embedding_scale=1.0),
    ("gemma4 moe", "norms of values"): _fields(value_norm=False),
    ("gemma4 moe", "norms of branches"): _fields(branch_norms=False),
    ("gemma4 moe", "the norm of routers"): _fields(router_norm=False),
    ("gemma4 moe", "factors of experts"): _fields(expert_scales=False),
    ("gemma4 moe", "layer scalars"): _fields(layer_scales=False),
    ("gemma4 moe", "windows"): _kinds(window_tokens=0),
    ("olmo2", "norms of all heads"): _fields(joint_norm=False),
    ("exaone4", "norms of heads"): _fields(head_norm=False),
    ("exaone4", "windows"): _kinds(window_tokens=0),
    ("exaone4", "layers without rotation"): _kinds(rotary=True),
    ("exaone4 without windows", "rotation"): _kinds(rotary=False),
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


NORMS = ("routed_norm", "routed_output_norm", "shared_output_norm", "router_norm", "ffn_norm", "ffn_output_norm")


@pytest.mark.parametrize("norm", NORMS)
def test_each_norm_of_a_branch_counts(norm: str, converted: Callable[[str, str], Package]) -> None:
    """Logits are others with the weights of another norm."""
    engine = ReferenceEngine(converted("gemma4 moe", "f16"))
    stored, other = engine._weights.vector, NORMS[(NORMS.index(norm) + 1) % len(NORMS)]
    engine._weights.vector = lambda name: stored(name.replace(f".{norm}", f".{other}"))  # type: ignore[method-assign]
    logits = engine.run(tokens(RECIPES["gemma4 moe"])).logits
    assert np.abs(logits - GOLDEN["gemma4 moe"]).max() > 0.05 * GOLDEN["gemma4 moe"].std()


def test_the_table_of_wide_heads_rotates_their_first_pairs(converted: Callable[[str, str], Package]) -> None:
    """With the frequencies of a head that rotates as a whole. Rotating half as many pairs changes logits."""
    engine = ReferenceEngine(converted("gemma4 moe", "f16"))
    stored, table = engine._weights.vector, engine._weights.vector("rope.inverse_frequency")
    assert table == pytest.approx(np.where(np.arange(48) < 24, 20_000.0 ** (-np.arange(48) / 48), 0))
    fewer = np.where(np.arange(48) < 12, table, np.float32(0))
    engine._weights.vector = lambda name: fewer if name == "rope.inverse_frequency" else stored(name)  # type: ignore[method-assign]
    logits = engine.run(tokens(RECIPES["gemma4 moe"])).logits
    assert np.abs(logits - GOLDEN["gemma4 moe"]).max() > 0.05 * GOLDEN["gemma4 moe"].std()


def test_layers_without_windows_have_heads_of_their_own(converted: Callable[[str, str], Package]) -> None:
    model = converted("gemma4 moe", "f16").manifest.model
    assert [(heads.key_heads, heads.width, heads.value_from_key) for heads in model.layer_heads] == [
        (4, 32, False), (2, 96, True), (4, 32, False), (2, 96, True),
    ]  # fmt: skip
    assert [vectors.elements for vectors in model.cached_vectors] == [2 * 4 * 32, 2 * 2 * 96] * 2
    dense = converted("gemma4", "f16").manifest.model
    assert {heads.key_heads for heads in dense.layer_heads} == {2}  # the field counts only where values are keys
    assert dense.windows_tokens == (9, 9, 0, 9, 0)


def test_heads_may_be_stated_by_the_number_of_a_layer(tmp_path: Path, converted: Callable[[str, str], Package]) -> None:
    """As transformers writes them."""
    source = write_checkpoint(tmp_path / "model", RECIPES["gemma4 moe"])
    path = source / "config.json"
    config = json.loads(path.read_text())
    del config["global_head_dim"], config["num_global_key_value_heads"]
    heads = {"head_dim": 96, "num_key_value_heads": 2}
    path.write_text(json.dumps({**config, "per_layer_config": {"1": heads, "3": heads}}))
    with open_checkpoint(source, Options()) as checkpoint:
        assert checkpoint.model == converted("gemma4 moe", "f16").manifest.model
    path.write_text(json.dumps({**config, "per_layer_config": {"1": {"sliding_window": 5}}}))
    with pytest.raises(UserError, match=r"per_layer_config\.1\.sliding_window: may not differ"):
        open_checkpoint(source, Options())


@pytest.mark.parametrize("name", ["olmo2", "olmo3", "gemma3", "gemma4", "gemma4 moe", "exaone4"])
def test_logits_without_norms_of_outputs_are_others(name: str, converted: Callable[[str, str], Package]) -> None:
    engine = ReferenceEngine(converted(name, "f16"))
    engine._output = lambda norm, change: change  # type: ignore[method-assign]
    logits = engine.run(tokens(RECIPES[name])).logits
    assert np.abs(logits - GOLDEN[name]).max() > 0.05 * GOLDEN[name].std()


def _older(name: str) -> str:
    return name if name.startswith("vision") else f"language_model.{name}"


def _newer(name: str) -> str:
    return f"model.{name}" if name.startswith("vision") else name.replace("model.", "model.language_model.", 1)


@pytest.mark.parametrize(
    ("name", "placed"), [("gemma3", _older), ("gemma3", _newer), ("gemma4", _newer), ("gemma4 moe", _newer)]
)
def test_a_language_model_beside_a_vision_tower_is_read_alone(
    name: str, placed: Callable[[str], str], tmp_path: Path, converted: Callable[[str, str], Package]
) -> None:
    """As published: the sizes that are the class's defaults are missing, and end tokens lie outside."""
    recipe = RECIPES[name]
    source = write_checkpoint(tmp_path / "model", replace(recipe, shards=1))
    stored = {placed(name): ("F32", value.shape, value.tobytes()) for name, value in tensors(recipe)}
    extra = np.ones(2, np.float32).tobytes()
    for tensor in ("vision_tower.vision_model.post_layernorm.bias", "vision_tower.patch_embedder.input_proj.weight"):
        stored[placed(tensor)] = ("F32", (2,), extra)
    write_safetensors(source / "model.safetensors", stored)
    config = json.loads((source / "config.json").read_text())
    architecture = recipe.architecture.replace("CausalLM", "ConditionalGeneration")
    outer = {"eos_token_id": [1, 106], "model_type": name[:6], "architectures": [architecture]}
    for key in ("eos_token_id", "tie_word_embeddings", "architectures", "hidden_activation"):
        del config[key]
    (source / "config.json").write_text(json.dumps({**outer, "vision_config": {}, "text_config": config}))
    package = convert(source, tmp_path / "package", quantization="f16")
    assert package.manifest.model == converted(name, "f16").manifest.model
    assert package.manifest.end_tokens == (1, 106)
    assert np.abs(ReferenceEngine(package).run(tokens(recipe)).logits - GOLDEN[name]).max() < 1e-3


def test_layers_of_a_kind_have_its_window(tmp_path: Path) -> None:
    for name, windows in (
        ("gemma2", (9, 0, 9)),
        ("gemma3", (9, 9, 0, 9)),
        ("olmo3", (9, 9, 9, 0, 9)),
        ("exaone4", (9, 9, 9, 0, 9)),
    ):
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
        (
            "gemma4",
            {"hidden_size_per_layer_input": 256},
            "hidden_size_per_layer_input: is 256: embeddings of each layer",
        ),
        ("gemma4", {"num_kv_shared_layers": 2}, "num_kv_shared_layers: is 2: layers that share keys and values"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention: concerns all tokens"),
        ("gemma4", {"rope_parameters": None}, "rope_parameters: is null"),
        ("gemma4 moe", {"num_experts": None}, "num_experts: expected"),
        ("gemma4 moe", {"attention_bias": True}, "attention_bias: is true"),
        ("exaone4", {"layer_types": None}, "sliding_window_pattern: expected a whole number"),
        ("olmo3", {"rope_parameters": None}, "rope_theta: does not say which base"),
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


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2", "olmo3", "gemma4 moe"])
def test_accelerators_and_neural_processors_refuse_such_models(
    name: str, converted: Callable[[str, str], Package]
) -> None:
    """Also with an activation that they compute."""
    manifest = converted(name, "q8").manifest
    assert "this model has" in (OpenClBackend().supports(manifest, "accelerator") or "")
    sparse = dataclasses.replace(manifest, model=dataclasses.replace(manifest.model, activation="relu"))
    assert "norms of outputs" in (OpenClBackend().supports(sparse, "accelerator") or "")
    assert "norms of" in (refusal(sparse) or "")
