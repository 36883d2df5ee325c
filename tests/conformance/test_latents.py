"""Multi-head latent attention: each of its mechanisms counts, and what is not supported is refused by its key."""

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
from neuronpipe.plans.reference import attention as reference
from neuronpipe.plans.reference.engine import ReferenceEngine
from neuronpipe.protocol.errors import UserError

from tests.conformance.checkpoints import RECIPES, tokens, write_checkpoint

GOLDEN = np.load(Path(__file__).parent / "golden" / "logits.npz")
ABLATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn's factor on scores": ("deepseek v2", {"attention_scale": 1.0}),
    "yarn's factor on rotated elements": ("deepseek v2", {"rotary_scale": 1.0}),
    "yarn's factor on scores in V3": ("deepseek v3", {"attention_scale": 1.0}),
    "rotation": ("glm4 lite", {"layer_kinds": (LayerKind(1, 0, False, 4), LayerKind(2, 0, False))}),
    "the factor of shares": ("deepseek v2 groups", {"routed_scale": 1.0}),
    "the best of a group": ("deepseek v2 groups", {"groups_by_best": False}),
    "groups": ("deepseek v2 groups", {"groups_by_best": False, "router_groups": 1, "groups_per_token": 1}),
    "groups of V3": ("deepseek v3", {"router_groups": 1, "groups_per_token": 1}),
    "shares that do not sum to 1": ("deepseek v2", {"normalized_shares": True}),
    "shares that sum to 1": ("deepseek v3", {"normalized_shares": False}),
    "the bias that chooses": ("glm4 lite", {"choosing_bias": False}),
}


def differ(logits: np.ndarray, name: str) -> bool:
    return bool(np.abs(logits - GOLDEN[name]).max() > 0.05 * GOLDEN[name].std())


@pytest.mark.parametrize("mechanism", ABLATIONS)
def test_logits_without_a_mechanism_are_others(mechanism: str, converted: Callable[[str, str], Package]) -> None:
    name, changes = ABLATIONS[mechanism]
    engine = ReferenceEngine(converted(name, "f16"))
    engine._model = dataclasses.replace(engine._model, **changes)
    assert differ(engine.run(tokens(RECIPES[name])).logits, name)


@pytest.mark.parametrize("name", ["deepseek v2 groups", "glm4 lite"])
def test_norms_of_latents_have_an_epsilon_of_their_own(
    name: str, converted: Callable[[str, str], Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = converted(name, "f16")
    assert package.manifest.model.norm_epsilon != reference.LATENT_EPSILON
    monkeypatch.setattr(reference, "LATENT_EPSILON", package.manifest.model.norm_epsilon)
    assert differ(ReferenceEngine(package).run(tokens(RECIPES[name])).logits, name)


@pytest.mark.parametrize(("name", "neighbours"), [("deepseek v3", False), ("glm4 lite", True)])
def test_which_elements_are_pairs_is_read(name: str, neighbours: bool, tmp_path: Path) -> None:
    source = changed_checkpoint(tmp_path / "model", name, rope_interleave=neighbours)
    package = convert(source, tmp_path / "package", quantization="f16")
    assert differ(ReferenceEngine(package).run(tokens(RECIPES[name])).logits, name)


def changed_checkpoint(folder: Path, recipe_name: str, **changes: Any) -> Path:
    """A recipe's checkpoint with other values in config.json."""
    source = write_checkpoint(folder, RECIPES[recipe_name])
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | changes))
    return source


def test_a_package_keeps_one_vector_of_a_position(converted: Callable[[str, str], Package]) -> None:
    model = converted("deepseek v2", "f16").manifest.model
    assert model.cached_vectors == ((1, 64 + 16),) * model.layers
    assert (model.query_width, model.heads_width) == (4 * 24, 4 * 80)


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("deepseek v2", {"norm_topk_prob": True}, "norm_topk_prob: is true"),
        ("deepseek v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek v2", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("deepseek v2", {"attention_bias": True}, "attention_bias: biases of attention"),
        ("deepseek v2", {"num_key_value_heads": 2}, "num_key_value_heads: 2 is not supported"),
        ("deepseek v2", {"moe_layer_freq": 2}, "moe_layer_freq: 2 is not supported"),
        ("deepseek v2", {"qk_rope_head_dim": 15}, "rotary_width: 15 of a head"),
        ("deepseek v3", {"topk_method": "greedy"}, "topk_method: .* only noaux_tc"),
        ("deepseek v3", {"head_dim": 48}, "head_dim: 48 is not supported"),
        ("deepseek v3", {"q_lora_rank": 64}, "q_a_proj.weight: has shape"),
        ("glm4 lite", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
        ("glm4 lite", {"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types"),
    ],
)
def test_a_configuration_that_is_not_supported_is_refused_by_its_key(
    name: str, change: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    if "qk_rope_head_dim" in change:
        change = {**change, "head_dim": change["qk_rope_head_dim"]}
    source = changed_checkpoint(tmp_path / "model", name, **change)
    with pytest.raises(UserError, match=complaint):
        convert(source, tmp_path / "package")
    assert not (tmp_path / "package").exists()
