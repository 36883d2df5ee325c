"""Qwen3: like Llama, but queries and keys are normed, each head by itself, before they are rotated."""

from __future__ import annotations

from collections.abc import Callable

from neuronpipe.plans.models.configuration import (
    GATED_DEFAULTS,
    GATED_NAMES,
    gated_activation,
    gated_model,
    refuse_biases,
    windows_of_qwen,
)
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.fields import Record

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
    refuse_biases(config, has)
    if config.has("attention_bias") and config.boolean("attention_bias"):
        config.fail("attention_bias", "is true, which means a bias of self_attn.o_proj as well: not supported")
    return gated_model(
        config,
        choices,
        family=NAME,
        activation=gated_activation(config, has, choices.activation),
        windows=windows_of_qwen(config),
        qkv_bias=False,
        head_norm=True,
    )


FAMILY = Family(
    name=NAME,
    architectures={
        "Qwen3ForCausalLM": Architecture(
            config_class="Qwen3Config",
            defaults=DEFAULTS,
            read=_read,
            names=GATED_NAMES,
        )
    },
    gguf={"qwen3": GgufArchitecture(interleaved=False, head_norm=True)},
)
