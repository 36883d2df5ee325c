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
    ("bamba", "norms by groups"): {"state_norm_groups": 1},
    ("granite hybrid dense", "the factor of embeddings"): {"embedding_scale": 1.0},
    ("granite hybrid", "the factor of what layers add"): {"residual_scale": 1.0},
}
# Mechanism -> a recurrent layer's vectors without it, as functions of what is stored.
VECTORS: dict[tuple[str, str], tuple[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]]] = {
    ("qwen3.5", "earlier tokens of convolutions"): ("convolution", lambda taps: _last(taps, 3)),
    ("lfm2", "earlier tokens of convolutions"): ("convolution", lambda taps: _last(taps, 3)),
    ("nemotron-h", "earlier tokens of convolutions"): ("convolution", lambda taps: _last(taps, 4)),
    **{(name, "decay"): ("decay", np.zeros_like) for name in (*DELTANET, *MAMBA)},
    **{(name, "biases of times"): ("time_bias", np.zeros_like) for name in (*DELTANET, *MAMBA)},
    **{(name, "weights of norms"): ("recurrent_norm", np.ones_like) for name in (*DELTANET, *MAMBA)},
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
    whole = dataclasses.replace(recipe, config=recipe.config | {"partial_rotary_factor": 1.0})
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
def test_logits_without_an_activation_are_others(
    function: str, converted: Converted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, function, np.abs)
    assert differ(ReferenceEngine(converted("qwen3.5", "f16")).run(tokens(RECIPES["qwen3.5"])).logits, "qwen3.5")


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
        ("nemotron-h moe", {"moe_latent_size": 16}, "moe_latent_size"),
        ("nemotron-h", {"use_bias": True}, "use_bias: is true"),
        ("granite hybrid", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ("granite hybrid", {"mamba_d_head": 15}, "mamba_d_head"),
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
