"""Recurrent layers: each of their mechanisms counts, published names are read, and what is not supported is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neuronpipe.plans.convert.conversion import convert
from neuronpipe.plans.models.spec import LayerKind
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.reference import recurrent
from neuronpipe.plans.reference.engine import ReferenceEngine
from neuronpipe.protocol.errors import UserError
from numpy.typing import NDArray

from tests.conformance.checkpoints import RECIPES, _stored, config, tensors, tokens, write_checkpoint, write_safetensors

Converted = Callable[[str, str], Package]
GOLDEN = np.load(Path(__file__).parent / "golden" / "logits.npz")
DELTANET, MAMBA = ("qwen3 next", "qwen3.5 moe"), ("nemotron-h", "granite hybrid")
KDA = ("kimi linear", "kimi linear groups")
# Mechanism -> recipe and other fields of the description.
FIELDS: dict[tuple[str, str], dict[str, Any]] = {
    ("qwen3 next", "gated attention"): {"gated_attention": False},
    ("qwen3.5", "norms of heads"): {"head_norm": False},
    ("qwen3 next", "the gate of shared experts"): {"shared_gate": False},
    ("qwen3 next", "shares that do not sum to 1"): {"normalized_shares": True},
    ("qwen3.5 moe", "shares that sum to 1"): {"normalized_shares": False},
    ("lfm2 moe", "the bias that chooses"): {"choosing_bias": False},
    ("lfm2 moe", "the factor of shares"): {"routed_scale": 1.0},
    ("nemotron-h", "the least time"): {"min_time_step": 0.0},
    ("nemotron-h", "norms by groups"): {"state_norm_groups": 1},
    ("nemotron-h", "biases of convolutions"): {"convolution_bias": False},
    ("nemotron-h moe", "shared experts"): {"shared_experts": 0},
    ("kimi linear", "shared experts"): {"shared_experts": 0},
    ("kimi linear", "the bias that chooses"): {"choosing_bias": False},
    ("kimi linear", "the factor of shares"): {"routed_scale": 1.0},
    ("kimi linear", "sigmoids of routers"): {"router": "softmax"},
    ("kimi linear groups", "shares that do not sum to 1"): {"normalized_shares": True},
    ("kimi linear groups", "groups"): {"router_groups": 1, "groups_per_token": 1},
    ("kimi linear", "heads that nothing rotates"): {
        "layer_kinds": (
            LayerKind(1, mixer="kda", dense_experts=3),
            LayerKind(1, mixer="kda"),
            LayerKind(1),
            LayerKind(1, mixer="kda"),
            LayerKind(1),
        )
    },
    ("bamba", "norms by groups"): {"state_norm_groups": 1},
    ("granite hybrid dense", "the factor of embeddings"): {"embedding_scale": 1.0},
    ("granite hybrid", "the factor of what layers add"): {"residual_scale": 1.0},
}
# Mechanism -> a recurrent layer's vectors without it, as functions of what is stored.
VECTORS: dict[tuple[str, str], tuple[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]]] = {
    ("qwen3.5", "earlier tokens of convolutions"): ("convolution", lambda taps: _last(taps, 3)),
    ("lfm2", "earlier tokens of convolutions"): ("convolution", lambda taps: _last(taps, 3)),
    ("nemotron-h", "earlier tokens of convolutions"): ("convolution", lambda taps: _last(taps, 4)),
    **{(name, "decay"): ("decay", np.zeros_like) for name in (*DELTANET, *KDA, *MAMBA)},
    **{(name, "biases of times"): ("time_bias", np.zeros_like) for name in (*DELTANET, *KDA, *MAMBA)},
    **{(name, "weights of norms"): ("recurrent_norm", np.ones_like) for name in (*DELTANET, *KDA, *MAMBA)},
    ("kimi linear", "earlier tokens of convolutions"): ("convolution", lambda taps: _last(taps, 4)),
    ("kimi linear", "decays that differ between channels"): ("time_bias", lambda bias: np.full_like(bias, bias.mean())),
    **{(name, "skipped values"): ("skip", np.zeros_like) for name in MAMBA},
}


def _last(taps: NDArray[np.float32], tokens_of_convolution: int) -> NDArray[np.float32]:
    only = taps.reshape(tokens_of_convolution, -1).copy()
    only[:-1] = 0
    return only.reshape(-1)


def differ(logits: NDArray[np.float32], name: str) -> bool:
    return bool(np.abs(logits - GOLDEN[name]).max() > 0.05 * GOLDEN[name].std())


@pytest.mark.parametrize(("name", "mechanism"), FIELDS)
def test_logits_without_a_mechanism_are_others(name: str, mechanism: str, converted: Converted) -> None:
    engine = ReferenceEngine(converted(name, "f16"))
    changes = FIELDS[name, mechanism]
    if mechanism == "gated attention":  # the rows of the gate stay in the matrix
        product = engine._product
        rows = engine._model.qkv_rows - engine._model.query_width
        engine._product = (
            lambda layer, part, x: (  # type: ignore[method-assign]
                product(layer, part, x)[:, :rows] if part == "qkv" else product(layer, part, x)
            )
        )
    engine._model = dataclasses.replace(engine._model, **changes)
    assert differ(engine.run(tokens(RECIPES[name])).logits, name)


def test_bamba_rotates_half_of_each_head(tmp_path: Path) -> None:
    recipe = RECIPES["bamba"]
    positions = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}
    whole = dataclasses.replace(recipe, config=recipe.config | {"rope_parameters": positions})
    package = convert(write_checkpoint(tmp_path / "model", whole), tmp_path / "package", quantization="f16")
    assert differ(ReferenceEngine(package).run(tokens(recipe)).logits, "bamba")


@pytest.mark.parametrize(("name", "mechanism"), VECTORS)
def test_logits_with_other_vectors_are_others(name: str, mechanism: str, converted: Converted) -> None:
    engine = ReferenceEngine(converted(name, "f16"))
    part, change = VECTORS[name, mechanism]
    stored = engine._weights.vector
    engine._weights.vector = lambda vector: (  # type: ignore[method-assign]
        change(stored(vector)) if vector.endswith(f".{part}") else stored(vector)
    )
    assert differ(engine.run(tokens(RECIPES[name])).logits, name)


@pytest.mark.parametrize("function", ["silu", "softplus", "sigmoid"])
@pytest.mark.parametrize("name", ["qwen3.5", "kimi linear"])
def test_logits_without_an_activation_are_others(
    name: str, function: str, converted: Converted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, function, np.abs)
    assert differ(ReferenceEngine(converted(name, "f16")).run(tokens(RECIPES[name])).logits, name)


@pytest.mark.parametrize("name", KDA)
@pytest.mark.parametrize(
    ("matrix", "change"),
    [
        ("recurrent_rates", np.zeros_like),  # the share that a memory takes over
        ("recurrent_gates", np.zeros_like),
        ("recurrent_decays", np.zeros_like),  # what a token says of its decays
        # The same decays for all channels of a head: those of gated DeltaNet.
        ("recurrent_decays", lambda x: np.repeat(x.reshape(len(x), -1, 32).mean(axis=2), 32, axis=1)),
    ],
)
def test_products_of_kimi_delta_attention_count(
    name: str, matrix: str, change: Callable[[NDArray[np.float32]], NDArray[np.float32]], converted: Converted
) -> None:
    engine = ReferenceEngine(converted(name, "f16"))
    product = engine._product
    engine._product = lambda layer, part, x: (  # type: ignore[method-assign]
        change(product(layer, part, x)) if part == matrix else product(layer, part, x)
    )
    assert differ(engine.run(tokens(RECIPES[name])).logits, name)


def test_queries_and_keys_of_kimi_delta_attention_have_length_1(
    converted: Converted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "LENGTH_EPSILON", np.float32(30))  # as much as the squares' sums
    assert differ(ReferenceEngine(converted("kimi linear", "f16")).run(tokens(RECIPES["kimi linear"])).logits, KDA[0])


def test_both_lists_of_layers_of_a_kimi_mean_the_same(tmp_path: Path, converted: Converted) -> None:
    """Published files number layers from 1, transformers names their kinds. It has other names for some keys, too."""
    recipe = RECIPES["kimi linear"]
    linear, kinds = recipe.config["linear_attn_config"], ["linear_attention"] * recipe.layers
    for number in linear["full_attn_layers"]:
        kinds[number - 1] = "full_attention"
    mlp_kinds = ["dense", *["sparse"] * 4]
    other: dict[str, Any] = {"layer_types": kinds, "mlp_layer_types": mlp_kinds, "linear_num_heads": 4}
    other |= {"linear_head_dim": 32, "n_group": 1, "num_experts_per_tok": 3, "n_shared_experts": 1}
    left_out = ("linear_attn_config", "first_k_dense_replace", "num_expert_group", "num_experts_per_token")
    values = {key: value for key, value in config(recipe).items() if key not in (*left_out, "num_shared_experts")}
    source = write_checkpoint(tmp_path / "model", recipe)
    (source / "config.json").write_text(json.dumps(values | other))
    package = convert(source, tmp_path / "package", quantization="f16")
    assert package.manifest.model == converted("kimi linear", "f16").manifest.model


def test_published_mixtures_beside_a_vision_tower_are_read(tmp_path: Path, converted: Converted) -> None:
    """Other classes, other names, and experts one by one: as transformers saves them."""
    recipe, source = RECIPES["qwen3.5 moe"], tmp_path / "model"
    write_checkpoint(source, dataclasses.replace(recipe, shards=1))
    text = {name: value for name, value in config(recipe).items() if name != "architectures"}
    text["eos_token_id"] = recipe.vocabulary - 1
    outer = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": text}
    (source / "config.json").write_text(json.dumps({**outer, "vision_config": {"depth": 1}}))
    renamed = {"model.visual.merger.norm.weight": np.ones(4, np.float32), "mtp.norm.weight": np.ones(4, np.float32)}
    for name, values in tensors(recipe):
        within = name.replace("model.", "model.language_model.", 1)
        if not name.endswith(("gate_up_proj", "down_proj")) or values.ndim == 2:
            renamed[within] = values
            continue
        for number, expert in enumerate(values):
            stem = within.replace("experts.", f"experts.{number}.")
            if name.endswith("down_proj"):
                renamed[f"{stem}.weight"] = expert
                continue
            for part, rows in zip(("gate_proj", "up_proj"), np.split(expert, 2), strict=True):
                renamed[f"{stem.replace('gate_up_proj', part)}.weight"] = rows
    stored = {name: _stored(np.ascontiguousarray(values), recipe.dtype) for name, values in renamed.items()}
    write_safetensors(source / "model.safetensors", stored)
    package = convert(source, tmp_path / "package", quantization="f16")
    expected = converted("qwen3.5 moe", "f16")
    assert package.manifest.model == expected.manifest.model
    for file in ("fixed.safetensors", "bundles.bin"):
        assert (package.path / file).read_bytes() == (expected.path / file).read_bytes()


def test_blocks_of_nemotron_become_layers_with_one_part_or_two(converted: Converted) -> None:
    model = converted("nemotron-h moe", "f16").manifest.model
    assert model.layer_kinds == (
        LayerKind(1, mixer="mamba2"),
        LayerKind(1, mixer="mamba2", feed_forward=False),
        LayerKind(1, rotary=False),
        LayerKind(1, mixer="none", dense_experts=3),
        LayerKind(1, mixer="mamba2"),
    )


def kimi(**changes: Any) -> dict[str, Any]:
    """The part of a Kimi-Linear's config.json about linear attention, with changes."""
    return {"linear_attn_config": RECIPES["kimi linear"].config["linear_attn_config"] | changes}


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("qwen3.5", {"layer_types": ["linear_attention"]}, "layer_types"),
        ("qwen3.5", {"layer_types": ["linear_attention", "kda"] * 2}, "layer_types.*kda"),
        ("qwen3.5", {"linear_num_value_heads": 3}, "state_heads: 3 is no multiple of state_key_heads, 2"),
        ("qwen3.5", {"linear_conv_kernel_dim": 99}, "linear_conv_kernel_dim"),
        ("qwen3 next", {"attention_bias": True}, "attention_bias: is true"),
        ("lfm2", {"conv_bias": True}, "conv_bias: is true"),
        ("nemotron-h", {"hybrid_override_pattern": "M-*X"}, "hybrid_override_pattern"),
        ("nemotron-h", {"mamba_hidden_act": "relu"}, "mamba_hidden_act: 'relu' is not supported"),
        (
            "nemotron-h moe",
            {"intermediate_size": 300},
            "has 90 neurons, but the intermediate_size of the .* 281 to 320",
        ),
        ("nemotron-h moe", {"moe_latent_size": 16}, "moe_latent_size"),
        ("nemotron-h", {"use_bias": True}, "use_bias: is true"),
        ("granite hybrid", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ("granite hybrid", {"mamba_d_head": 15}, "mamba_d_head"),
        ("kimi linear", {"linear_attn_config": 3}, r"config\.json: linear_attn_config: expected an object"),
        ("kimi linear", kimi(num_heads=0), r"config\.json: linear_attn_config\.num_heads: "),
        ("kimi linear", kimi(head_dim=-1), r"linear_attn_config\.head_dim: "),
        ("kimi linear", kimi(short_conv_kernel_size=99), r"linear_attn_config\.short_conv_kernel_size: "),
        ("kimi linear", kimi(kda_layers=[1, 2]), r"linear_attn_config\.kda_layers: does not list each of 5 layers"),
        ("kimi linear", kimi(kda_layers=[1, 2, 4, 5]), r"linear_attn_config\.kda_layers: does not list"),
        ("kimi linear", kimi(full_attn_layers=[3, 6]), r"linear_attn_config\.full_attn_layers: .* from 1 to 5"),
        ("kimi linear", kimi(gate_lower_bound=-5.0), r"linear_attn_config\.gate_lower_bound: is not supported"),
        ("kimi linear", kimi(use_full_rank_gate=True), r"linear_attn_config\.use_full_rank_gate: is not supported"),
        ("kimi linear", {"mla_use_nope": False}, r"config\.json: mla_use_nope: is false"),
        ("kimi linear", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling: heads are not rotated"),
        ("kimi linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func: 'softmax'"),
        ("kimi linear", {"num_expert_group": 5}, "num_expert_group: 5 groups of 12 experts"),
        ("kimi linear", {"num_experts_per_token": 99}, "num_experts_per_token: "),
        ("kimi linear", {"hidden_act": "relu"}, "hidden_act: "),
        ("kimi linear", {"moe_layer_freq": 2}, "moe_layer_freq: 2 is not supported"),
        ("kimi linear", {"attention_bias": True}, "attention_bias: biases"),
        ("kimi linear groups", {"layer_types": ["kda"] * 4}, "layer_types: "),
        ("kimi linear groups", {"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types: "),
        ("kimi linear groups", {"use_grouped_topk": False}, "use_grouped_topk: is false, but there are 4 groups"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_key(
    name: str, changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "model", RECIPES[name])
    (source / "config.json").write_text(json.dumps(config(RECIPES[name]) | changes))
    with pytest.raises(UserError, match=complaint):
        convert(source, tmp_path / "package", quantization="f16")
    assert not (tmp_path / "package").exists()


def test_a_bare_infinity_is_read(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "model", RECIPES["granite hybrid"])
    text = (source / "config.json").read_text()
    bare = json.dumps(json.loads(text) | {"time_step_limit": [0.0, float("inf")]})
    assert "Infinity]" in bare
    (source / "config.json").write_text(bare)
    assert convert(source, tmp_path / "package", quantization="f16").manifest.model.is_recurrent
