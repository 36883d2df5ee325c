"""gpt-oss: experts with a clamped SwiGLU, biases everywhere, attention sinks, and a window in every other layer.

Each query head has a learned score that joins its softmax and whose share is dropped (a sink). The shares of experts
are the softmax of the chosen router values. YaRN's bounds are not rounded to whole pairs. In checkpoints the rows of
gate and up alternate, and published ones store experts in MXFP4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from neuronpipe.plans.models.configuration import (
    FULL,
    GATED_NAMES,
    SLIDING,
    build_spec,
    sizes,
    sliding_windows,
)
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture
from neuronpipe.plans.models.spec import MAX, MAX_THRESHOLD, ModelSpec, runs_of
from neuronpipe.plans.strict_json import Record

NAME = "gpt_oss"
GAIN, LIMIT = 1.702, 7.0

# GptOssConfig in transformers/models/gpt_oss/configuration_gpt_oss.py.
DEFAULTS = {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "num_experts_per_tok": 4,
    "swiglu_alpha": GAIN,
    "swiglu_limit": LIMIT,
    "layer_types": None,
    "attention_bias": True,
    "eos_token_id": None,
}
NAMES = replace(
    GATED_NAMES,
    query_norm=None,
    key_norm=None,
    sinks="self_attn.sinks",
    router="mlp.router",
    joined_gate_up="mlp.experts.gate_up_proj",
    gate="gate",
    up="up",
    down="mlp.experts.down_proj",
    predictor=None,
)


def _read(config: Record, has: Callable[[str], bool], choices: Choices) -> ModelSpec:
    if choices.activation is not None:
        config.fail("hidden_act", "the experts of this class have an activation of their own; leave out --activation")
    if config.text("hidden_act") != "silu":
        config.fail("hidden_act", "is not silu: not supported")
    if not config.boolean("attention_bias"):
        config.fail("attention_bias", "is false: not supported in this class")
    if (gain := config.number("swiglu_alpha", 0.0, MAX_THRESHOLD)) != GAIN:
        config.fail("swiglu_alpha", f"{gain} is not supported; {GAIN} is")
    layers, experts = (
        config.integer("num_hidden_layers", 1, MAX.layers),
        config.integer("num_local_experts", 2, MAX.experts),
    )
    if not config.has("layer_types"):
        kinds = [FULL if layer % 2 else SLIDING for layer in range(layers)]
        config = config.replaced({"layer_types": kinds})
    return build_spec(
        config,
        **sizes(config, choices),
        family=NAME,
        experts=experts,
        experts_per_token=config.integer("num_experts_per_tok", 1, experts),
        layer_kinds=runs_of(sliding_windows(config, reads_layer_types=True)),
        norm_epsilon=config.number("rms_norm_eps", 0.0, 1.0),
        activation="clamped_swiglu",
        activation_limit=config.number("swiglu_limit", 0.0, MAX_THRESHOLD),
        qkv_bias=True,
        output_bias=True,
        ffn_bias=True,
        router_bias=True,
        attention_sinks=True,
    )


FAMILY = Family(
    name=NAME,
    architectures={
        "GptOssForCausalLM": Architecture(config_class="GptOssConfig", defaults=DEFAULTS, read=_read, names=NAMES)
    },
    gguf={
        "gpt-oss": GgufArchitecture(
            interleaved=False,
            activation="clamped_swiglu",
            activation_limit=LIMIT,
            ffn_norm="post_attention_norm",
            full_layer_every=2,
            rounds_yarn=False,
        )
    },
)
