"""OLMoE and MiniMax-M2: mixtures whose queries and keys are normed over all heads together.

OLMoE's shares are a softmax over all experts and do not sum to 1, and it may limit queries, keys and values.
MiniMax-M2's are sigmoids, with a bias that only chooses, and a part of each head rotates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from neuronpipe.plans.models.configuration import (
    EXPERT_NAMES,
    GATED_DEFAULTS,
    biases,
    gated_activation,
    gated_model,
)
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture
from neuronpipe.plans.models.mixtral import NAMES as MIXTRAL_NAMES
from neuronpipe.plans.models.mixture_configuration import Mixture
from neuronpipe.plans.models.olmo import clip_limit
from neuronpipe.plans.models.spec import MAX, ModelSpec
from neuronpipe.plans.strict_json import Record

NAME = "olmoe"
Has = Callable[[str], bool]

# OlmoeConfig in transformers/models/olmoe/configuration_olmoe.py.
OLMOE_DEFAULTS = {
    **GATED_DEFAULTS,
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": None,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "clip_qkv": None,
    "num_experts_per_tok": 8,
    "num_experts": 64,
    "norm_topk_prob": False,
    "eos_token_id": 50279,
}
# MiniMaxM2Config in transformers/models/minimax_m2/configuration_minimax_m2.py.
MINIMAX_DEFAULTS = {
    **GATED_DEFAULTS,
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "rope_theta": 5_000_000.0,
    "num_experts_per_tok": 8,
    "num_local_experts": 256,
    "eos_token_id": 200020,
}
MINIMAX_NAMES = replace(MIXTRAL_NAMES, choosing_bias="block_sparse_moe.e_score_correction_bias")


def _olmoe(config: Record, has: Has, choices: Choices) -> ModelSpec:
    experts = config.integer("num_experts", 2, MAX.experts)
    mixture = Mixture(
        experts,
        config.integer("num_experts_per_tok", 1, experts),
        normalized_shares=config.boolean("norm_topk_prob"),
    )
    return _model(config, has, choices, mixture, clip_limit(config))


def _minimax(config: Record, has: Has, choices: Choices) -> ModelSpec:
    experts = config.integer("num_local_experts", 2, MAX.experts)
    chosen = config.integer("num_experts_per_tok", 1, experts)
    return _model(config, has, choices, Mixture(experts, chosen, router="sigmoid", choosing_bias=True))


def _model(config: Record, has: Has, choices: Choices, mixture: Mixture, qkv_limit: float = 0.0) -> ModelSpec:
    return gated_model(
        config,
        choices,
        family=NAME,
        activation=gated_activation(config, has, choices.activation),
        windows=[0] * config.integer("num_hidden_layers", 1, MAX.layers),
        joint_norm=True,
        mixture=mixture,
        further={"qkv_limit": qkv_limit},
        **biases(config, has),
    )


FAMILY = Family(
    name=NAME,
    architectures={
        "OlmoeForCausalLM": Architecture(
            config_class="OlmoeConfig", defaults=OLMOE_DEFAULTS, read=_olmoe, names=EXPERT_NAMES
        ),
        "MiniMaxM2ForCausalLM": Architecture(
            config_class="MiniMaxM2Config",
            defaults=MINIMAX_DEFAULTS,
            read=_minimax,
            names=MINIMAX_NAMES,
            partial_rotary=True,
        ),
    },
    gguf={
        "olmoe": GgufArchitecture(interleaved=False, joint_norm=True, normalized_shares=False),
        "minimax-m2": GgufArchitecture(interleaved=False, joint_norm=True, router="sigmoid", partial_rotary=True),
    },
)
