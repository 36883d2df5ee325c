"""Seed-OSS: like Llama, but queries, keys and values have biases, and heads are wider than their part of the stream."""

from __future__ import annotations

from collections.abc import Callable

from neuronpipe.plans.models.configuration import GATED_DEFAULTS, GATED_NAMES, gated_activation, gated_model
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture
from neuronpipe.plans.models.spec import MAX, ModelSpec
from neuronpipe.plans.strict_json import Record

NAME = "seed_oss"

# SeedOssConfig in transformers/models/seed_oss/configuration_seed_oss.py.
DEFAULTS = {
    **GATED_DEFAULTS,
    "vocab_size": 155_136,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524_288,
    "attention_bias": True,
    "attention_out_bias": False,
    "mlp_bias": False,
    "eos_token_id": 2,
}


def _read(config: Record, has: Callable[[str], bool], choices: Choices) -> ModelSpec:
    return gated_model(
        config,
        choices,
        family=NAME,
        activation=gated_activation(config, has, choices.activation),
        windows=[0] * config.integer("num_hidden_layers", 1, MAX.layers),
        qkv_bias=config.boolean("attention_bias"),
        output_bias=config.boolean("attention_out_bias"),
        ffn_bias=config.boolean("mlp_bias"),
    )


FAMILY = Family(
    name=NAME,
    architectures={
        "SeedOssForCausalLM": Architecture(
            config_class="SeedOssConfig", defaults=DEFAULTS, read=_read, names=GATED_NAMES
        )
    },
    gguf={"seed_oss": GgufArchitecture(interleaved=False, ffn_norm="post_attention_norm")},
)
