"""GLM-4.5, GLM-4.6 and dots.llm1: mixtures with shared experts whose first layers have no router.

Routers are those of DeepSeek-V3: the sigmoids of router values are shares, and a bias is added to them only to choose.
GLM rotates half of each head. Its checkpoints have a further layer that predicts several tokens, which is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from neuronpipe.plans.models.configuration import (
    EXPERT_NAMES,
    GATED_DEFAULTS,
    biases,
    gated_activation,
    gated_model,
    sliding_windows,
)
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture
from neuronpipe.plans.models.mixture_configuration import (
    DEEPSEEK_DEFAULTS,
    deepseek_mixture,
    dense_experts,
    first_layers,
)
from neuronpipe.plans.models.spec import MAX, ModelSpec
from neuronpipe.plans.strict_json import Record

NAME = "glm4_moe"
Has = Callable[[str], bool]

# Glm4MoeConfig in transformers/models/glm4_moe/configuration_glm4_moe.py.
GLM_DEFAULTS = {
    **GATED_DEFAULTS,
    **DEEPSEEK_DEFAULTS,
    "vocab_size": 151552,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "use_qk_norm": False,
    "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 1,
    "eos_token_id": None,
}
# Dots1Config in transformers/models/dots1/configuration_dots1.py.
DOTS_DEFAULTS = {
    **GATED_DEFAULTS,
    **DEEPSEEK_DEFAULTS,
    "vocab_size": 152064,
    "hidden_size": 4608,
    "intermediate_size": 10944,
    "num_hidden_layers": 62,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": None,
    "n_routed_experts": None,
    "sliding_window": 4096,
    "max_window_layers": 62,
    "layer_types": None,
    "eos_token_id": None,
}
NAMES = replace(
    EXPERT_NAMES,
    choosing_bias="mlp.gate.e_score_correction_bias",
    shared="mlp.shared_experts.{}_proj",
)


def _glm(config: Record, has: Has, choices: Choices) -> ModelSpec:
    return _model(
        config,
        has,
        choices,
        windows=[0] * config.integer("num_hidden_layers", 1, MAX.layers),
        bias={"qkv_bias": config.boolean("attention_bias")},
        head_norm=config.boolean("use_qk_norm"),
    )


def _dots(config: Record, has: Has, choices: Choices) -> ModelSpec:
    first = config.integer("max_window_layers", 0, MAX.layers)
    windows = sliding_windows(config, first_layer=first, reads_layer_types=True)
    return _model(config, has, choices, windows=windows, bias=biases(config, has), head_norm=True)


def _model(
    config: Record, has: Has, choices: Choices, *, windows: list[int], bias: dict[str, Any], head_norm: bool
) -> ModelSpec:
    return gated_model(
        config,
        choices,
        family=NAME,
        activation=gated_activation(config, has, choices.activation),
        windows=windows,
        **bias,
        head_norm=head_norm,
        neurons="moe_intermediate_size",
        mixture=deepseek_mixture(config),
        dense_experts=dense_experts(config, first_layers(config), "intermediate_size", "moe_intermediate_size"),
    )


FAMILY = Family(
    name=NAME,
    architectures={
        "Glm4MoeForCausalLM": Architecture(
            config_class="Glm4MoeConfig",
            defaults=GLM_DEFAULTS,
            read=_glm,
            names=NAMES,
            partial_rotary=True,
            extra_layers="num_nextn_predict_layers",
        ),
        "Dots1ForCausalLM": Architecture(config_class="Dots1Config", defaults=DOTS_DEFAULTS, read=_dots, names=NAMES),
    },
    gguf={
        "glm4moe": GgufArchitecture(
            interleaved=False,
            router="sigmoid",
            normalized_shares=False,
            partial_rotary=True,
            ffn_norm="post_attention_norm",
        ),
        "dots1": GgufArchitecture(interleaved=False, router="sigmoid", normalized_shares=False),
    },
)
