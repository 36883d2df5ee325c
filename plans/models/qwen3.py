"""Qwen3, the mixtures of Qwen2 and Qwen3, and the text of Qwen3-VL.

Qwen3 is like Llama, but queries and keys are normed, each head by itself, before they are rotated. The mixtures of
Qwen2 have biases of queries, keys and values instead, and shared experts with a gate. Some layers may have no router.
Qwen3-VL adds what it sees to embeddings and to the first layers, which a text does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from neuronpipe.plans.models.configuration import (
    EXPERT_NAMES,
    FULL,
    GATED_DEFAULTS,
    GATED_NAMES,
    SLIDING,
    biases,
    gated_activation,
    gated_model,
    sliding_windows,
    windows_of_qwen,
)
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture
from neuronpipe.plans.models.llama import QWEN_VISION
from neuronpipe.plans.models.mixture_configuration import Mixture, dense_experts, qwen_layers
from neuronpipe.plans.models.spec import MAX, ModelSpec
from neuronpipe.plans.strict_json import Record

NAME = "qwen3"

# Qwen3Config in transformers/models/qwen3/configuration_qwen3.py.
DEFAULTS = {
    **GATED_DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
    "eos_token_id": None,
}


def _read(config: Record, has: Callable[[str], bool], choices: Choices) -> ModelSpec:
    return gated_model(
        config,
        choices,
        family=NAME,
        activation=gated_activation(config, has, choices.activation),
        windows=windows_of_qwen(config),
        head_norm=True,
        **biases(config, has),
    )


# Qwen3MoeConfig in transformers/models/qwen3_moe/configuration_qwen3_moe.py.
MOE_DEFAULTS = {
    **{name: DEFAULTS[name] for name in DEFAULTS if name not in ("max_window_layers", "layer_types")},
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "intermediate_size": 6144,
    "num_key_value_heads": 4,
    "head_dim": None,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
    "mlp_only_layers": None,
}
MOE_NAMES = replace(EXPERT_NAMES, shared="mlp.shared_expert.{}_proj", shared_gate="mlp.shared_expert_gate")
# Qwen2MoeConfig in transformers/models/qwen2_moe/configuration_qwen2_moe.py.
QWEN2_MOE_DEFAULTS = {
    **{name: value for name, value in MOE_DEFAULTS.items() if name != "attention_bias"},
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "qkv_bias": True,
    "max_window_layers": 28,
    "layer_types": None,
}
# Qwen3VLTextConfig and Qwen3VLMoeTextConfig in transformers/models/qwen3_vl and qwen3_vl_moe.
_NOT_OF_VL = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "eos_token_id")
VL_DEFAULTS = {
    **{name: value for name, value in DEFAULTS.items() if name not in _NOT_OF_VL},
    "max_position_embeddings": 128000,
    "rope_theta": 500_000.0,
}
VL_MOE_DEFAULTS = {
    **{name: value for name, value in MOE_DEFAULTS.items() if name not in (*_NOT_OF_VL, "norm_topk_prob")},
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 128000,
    "rope_theta": 500_000.0,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "num_experts": 60,
}
VL_MOE_NAMES = replace(
    EXPERT_NAMES, fused_experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), turns_experts=True
)


def _read_moe(config: Record, has: Callable[[str], bool], choices: Choices) -> ModelSpec:
    return _mixture(config, has, choices, windows=_windows(config), bias=biases(config, has), head_norm=True)


def _read_qwen2_moe(config: Record, has: Callable[[str], bool], choices: Choices) -> ModelSpec:
    shared, of_expert = (
        config.integer(key, 1, MAX.neurons) for key in ("shared_expert_intermediate_size", "moe_intermediate_size")
    )
    return _mixture(
        config,
        has,
        choices,
        windows=_windows_of_qwen2(config),
        bias={"qkv_bias": config.boolean("qkv_bias")},
        head_norm=False,
        shared_experts=-(-shared // of_expert),
    )


def _windows(config: Record) -> list[int]:
    """Return the window of each layer of a Qwen3 mixture, which all have the same."""
    has_windows = config.boolean("use_sliding_window")
    return sliding_windows(
        config if has_windows else config.replaced({"sliding_window": None}), reads_layer_types=False
    )


def _windows_of_qwen2(config: Record) -> list[int]:
    """Return the window of each layer of a Qwen2 mixture: if layer_types does not say otherwise, every second layer up
    to `max_window_layers` has one."""
    layers = config.integer("num_hidden_layers", 1, MAX.layers)
    if not config.boolean("use_sliding_window"):
        return [0] * layers
    last = config.integer("max_window_layers", 0, MAX.layers)
    usual = [SLIDING if layer % 2 == 0 and layer < last else FULL for layer in range(layers)]
    config = config if config.has("layer_types") else config.replaced({"layer_types": usual})
    return sliding_windows(config, reads_layer_types=True)


def _mixture(
    config: Record,
    has: Callable[[str], bool],
    choices: Choices,
    *,
    windows: list[int],
    bias: dict[str, Any],
    head_norm: bool,
    shared_experts: int = 0,
) -> ModelSpec:
    experts, layers = config.integer("num_experts", 2, MAX.experts), qwen_layers(config)
    return gated_model(
        config,
        choices,
        family=NAME,
        activation=gated_activation(config, has, choices.activation),
        windows=windows,
        **bias,
        head_norm=head_norm,
        neurons="moe_intermediate_size",
        mixture=Mixture(
            experts,
            config.integer("num_experts_per_tok", 1, experts),
            shared_experts=shared_experts,
            shared_gate=shared_experts > 0,
            normalized_shares=config.boolean("norm_topk_prob"),
        ),
        dense_experts=dense_experts(config, layers, "intermediate_size", "moe_intermediate_size"),
    )


FAMILY = Family(
    name=NAME,
    architectures={
        "Qwen3ForCausalLM": Architecture(
            config_class="Qwen3Config",
            defaults=DEFAULTS,
            read=_read,
            names=GATED_NAMES,
        ),
        "Qwen3MoeForCausalLM": Architecture(
            config_class="Qwen3MoeConfig",
            defaults=MOE_DEFAULTS,
            read=_read_moe,
            names=MOE_NAMES,
            renamed={"num_local_experts": "num_experts"},  # transformers 5 writes the former
        ),
        "Qwen3VLForConditionalGeneration": Architecture(
            config_class="Qwen3VLTextConfig",
            defaults=VL_DEFAULTS,
            read=_read,
            names=GATED_NAMES,
            harmless=QWEN_VISION,
            part="text_config",
        ),
        "Qwen3VLMoeForConditionalGeneration": Architecture(
            config_class="Qwen3VLMoeTextConfig",
            defaults=VL_MOE_DEFAULTS,
            read=_read_moe,
            names=VL_MOE_NAMES,
            harmless=QWEN_VISION,
            part="text_config",
            renamed={"num_local_experts": "num_experts"},
            constants={"norm_topk_prob": True, "use_sliding_window": False},
        ),
        "Qwen2MoeForCausalLM": Architecture(
            config_class="Qwen2MoeConfig", defaults=QWEN2_MOE_DEFAULTS, read=_read_qwen2_moe, names=MOE_NAMES
        ),
    },
    gguf={
        "qwen3": GgufArchitecture(interleaved=False),
        "qwen3moe": GgufArchitecture(interleaved=False),
        "qwen2moe": GgufArchitecture(interleaved=False, normalized_shares=False),
        **dict.fromkeys(("qwen3vl", "qwen3vlmoe"), GgufArchitecture(interleaved=False)),
    },
)
