"""Phi-3, Phi-3.5 and Phi-4-mini, and the mixture Phi-3.5-MoE.

Dense ones have queries, keys and values in one tensor, and gate and up in another. The mixture has LayerNorm, biases of
attention and of the logits, and the router "sparsemixer". Rotary positions "longrope" have one table up to the original
length and another beyond it: a package has the first one, and that length, unless a longer context is requested.

GGUF files of dense ones state the window, where llama.cpp computes all positions; old files state none, and have none.

GGUF files of the mixture have all tensors, but neither the jitter of the router, here as published, nor the factors of
queries and keys, `short_mscale` and `long_mscale`: llama.cpp's converter writes one that follows from the lengths. In
Phi-3.5-MoE it is 1.190 instead of 1.243. llama.cpp computes RMS norms and a softmax of the two best experts; a package
is computed with LayerNorm and sparsemixer, as the model was trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from neuronpipe.plans.models.configuration import (
    GATED_DEFAULTS,
    GATED_NAMES,
    build_spec,
    gated_activation,
    gated_model,
    sizes,
    sliding_windows,
)
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture
from neuronpipe.plans.models.mixtral import NAMES as MIXTRAL_NAMES
from neuronpipe.plans.models.spec import MAX, ModelSpec, runs_of
from neuronpipe.plans.strict_json import Record

NAME = "phi"
JITTER = 0.01
Has = Callable[[str], bool]

# Phi3Config in transformers/models/phi3/configuration_phi3.py.
PHI3_DEFAULTS = {
    **GATED_DEFAULTS,
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_key_value_heads": None,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "eos_token_id": 32000,
}
# PhimoeConfig in transformers/models/phimoe/configuration_phimoe.py.
PHIMOE_DEFAULTS = {
    **GATED_DEFAULTS,
    "vocab_size": 32064,
    "intermediate_size": 6400,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096 * 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "router_jitter_noise": JITTER,
    "attention_bias": False,
    "lm_head_bias": False,
    "eos_token_id": 2,
}
PHI3_NAMES = replace(
    GATED_NAMES,
    query=None,
    key=None,
    value=None,
    query_key_value="self_attn.qkv_proj",
    gate_up="mlp.gate_up_proj",
    predictor=None,
)


def _phi3(config: Record, has: Has, choices: Choices) -> ModelSpec:
    return gated_model(
        config,
        choices,
        family=NAME,
        activation=gated_activation(config, has, choices.activation),
        windows=sliding_windows(config, reads_layer_types=False),
        qkv_bias=False,
    )


def _phimoe(config: Record, has: Has, choices: Choices) -> ModelSpec:
    biased, experts = config.boolean("attention_bias"), config.integer("num_local_experts", 2, MAX.experts)
    return build_spec(
        config,
        **sizes(config, choices),
        family=NAME,
        experts=experts,
        experts_per_token=2,  # the class always takes two, whatever num_experts_per_tok says
        router="sparsemixer",
        router_jitter=config.number("router_jitter_noise", 0.0, 0.5),
        layer_kinds=runs_of(sliding_windows(config, reads_layer_types=False)),
        norm="layer",
        norm_epsilon=config.number("rms_norm_eps", 0.0, 1.0),
        activation=gated_activation(config, has, choices.activation),
        qkv_bias=biased,
        output_bias=biased,
        logit_bias=config.boolean("lm_head_bias"),
    )


PHIMOE = Architecture(config_class="PhimoeConfig", defaults=PHIMOE_DEFAULTS, read=_phimoe, names=MIXTRAL_NAMES)
FAMILY = Family(
    name=NAME,
    architectures={
        "Phi3ForCausalLM": Architecture(
            config_class="Phi3Config", defaults=PHI3_DEFAULTS, read=_phi3, names=PHI3_NAMES, partial_rotary=True
        ),
        "PhimoeForCausalLM": PHIMOE,
        "PhiMoEForCausalLM": PHIMOE,  # as published, with code of its own
    },
    gguf={
        "phi3": GgufArchitecture(interleaved=False, partial_rotary=True, joint_gate_up=True),
        "phimoe": GgufArchitecture(interleaved=False, norm="layer", router="sparsemixer", router_jitter=JITTER),
    },
)
