"""Mixtures of many families, and dense models of their makers: each mechanism of router, experts, attention counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neuronpipe.plans.convert import convert
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.reference.engine import ReferenceEngine

from tests.conformance.checkpoints import RECIPES, tokens, write_checkpoint

GOLDEN = np.load(Path(__file__).parent / "golden" / "logits.npz")
PLAIN_ROUTER: dict[str, Any] = {"router": "softmax", "router_jitter": 0.0}
ABLATIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("glm4moe", "the bias that chooses"): {"choosing_bias": False},
    ("glm4moe", "the factor of shares"): {"routed_scale": 1.0},
    ("glm4moe", "shared experts"): {"shared_experts": 0},
    ("glm4moe", "shares that sum to 1"): {"normalized_shares": False},
    ("glm4moe groups", "groups"): {"router_groups": 1, "groups_per_token": 1},
    ("glm4moe groups", "shares that do not sum to 1"): {"normalized_shares": True},
    ("glm4moe groups", "norms of heads"): {"head_norm": False},
    ("qwen2moe", "the gate of shared experts"): {"shared_gate": False},
    ("qwen2moe", "shares that do not sum to 1"): {"normalized_shares": True},
    ("qwen2moe", "biases of queries, keys and values"): {"qkv_bias": False},
    ("olmoe", "norms over all heads"): {"joint_norm": False},
    ("olmoe", "shares that do not sum to 1"): {"normalized_shares": True},
    ("ernie4_5moe", "the bias that chooses"): {"choosing_bias": False},
    ("ernie4_5moe", "shared experts"): {"shared_experts": 0},
    ("dots1", "sigmoids"): {"router": "softmax"},
    ("minimax-m2", "norms over all heads"): {"joint_norm": False},
    ("minimax-m2", "the bias that chooses"): {"choosing_bias": False},
    ("hunyuan moe", "norms after rotation"): {"norm_after_rotation": False},
    ("hunyuan moe", "shared experts"): {"shared_experts": 0},
    ("hunyuan dense", "norms of heads"): {"head_norm": False, "norm_after_rotation": False},
    ("hunyuan dense", "norms after rotation"): {"norm_after_rotation": False},
    ("seed-oss", "biases of queries, keys and values"): {"qkv_bias": False},
    ("phimoe", "sparsemixer"): PLAIN_ROUTER,
    ("phimoe", "experts that are near"): {"router_jitter": 0.0},
    ("phimoe", "biases of logits"): {"logit_bias": False},
    ("phimoe", "the factor of queries and keys"): {"attention_scale": 1.0},
    ("phi3", "the factor of rotated elements"): {"rotary_scale": 1.0},
    ("bailing", "shared experts"): {"shared_experts": 0},
    ("bailing", "softmax"): {"router": "sigmoid"},
    ("bailing v2", "the bias that chooses"): {"choosing_bias": False},
    ("bailing v2", "groups"): {"router_groups": 1, "groups_per_token": 1},
    ("bailing v2", "norms of heads"): {"head_norm": False},
    ("bailing v2", "the factor of shares"): {"routed_scale": 1.0},
    ("granitemoe", "the factor of embeddings"): {"embedding_scale": 1.0},
}


@pytest.mark.parametrize(("name", "mechanism"), ABLATIONS)
def test_logits_without_a_mechanism_are_others(
    name: str, mechanism: str, converted: Callable[[str, str], Package]
) -> None:
    engine = ReferenceEngine(converted(name, "f16"))
    engine._model = dataclasses.replace(engine._model, **ABLATIONS[name, mechanism])
    logits = engine.run(tokens(RECIPES[name])).logits
    assert np.abs(logits - GOLDEN[name]).max() > 0.05 * GOLDEN[name].std()


def test_an_ernie_read_as_a_llama_has_other_logits(tmp_path: Path) -> None:
    """Only the pairs that rotate differ."""
    source = write_checkpoint(tmp_path / "model", RECIPES["ernie4_5"])
    path = source / "config.json"
    path.write_text(path.read_text().replace("Ernie4_5ForCausalLM", "LlamaForCausalLM"))
    logits = ReferenceEngine(convert(source, tmp_path / "package", quantization="f16")).run(tokens(RECIPES["ernie4_5"]))
    assert np.abs(logits.logits - GOLDEN["ernie4_5"]).max() > 0.05 * GOLDEN["ernie4_5"].std()
