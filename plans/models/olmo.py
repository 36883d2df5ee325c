"""OLMo of 2024: like Llama with LayerNorms without weights, and in some sizes a limit of queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from neuronpipe.plans.models.configuration import (
    GATED_DEFAULTS,
    GATED_NAMES,
    biases,
    build_spec,
    gated_activation,
    sizes,
)
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture
from neuronpipe.plans.models.spec import MAX, MAX_THRESHOLD, MIN_SCALE, LayerKind, ModelSpec
from neuronpipe.plans.strict_json import Record

NAME = "olmo"
EPSILON = 1e-5  # a constant of OlmoLayerNorm

# OlmoConfig in transformers/models/olmo/configuration_olmo.py.
DEFAULTS = {
    **{name: value for name, value in GATED_DEFAULTS.items() if name != "rms_norm_eps"},
    "vocab_size": 50304,
    "intermediate_size": 11008,
    "num_key_value_heads": None,  # as many as heads
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "clip_qkv": None,
    "eos_token_id": 50279,
}


def clip_limit(config: Record) -> float:
    """Return `qkv_limit` of ModelSpec, which classes of OLMo call `clip_qkv`; 0 if it is null."""
    return config.number("clip_qkv", MIN_SCALE, MAX_THRESHOLD) if config.has("clip_qkv") else 0.0


def _read(config: Record, has: Callable[[str], bool], choices: Choices) -> ModelSpec:
    return build_spec(
        config,
        **sizes(config, choices),
        family=NAME,
        layer_kinds=(LayerKind(config.integer("num_hidden_layers", 1, MAX.layers)),),
        norm="layer",
        norm_epsilon=EPSILON,
        activation=gated_activation(config, has, choices.activation),
        qkv_limit=clip_limit(config),
        **biases(config, has),
    )


FAMILY = Family(
    name=NAME,
    architectures={
        "OlmoForCausalLM": Architecture(
            config_class="OlmoConfig", defaults=DEFAULTS, read=_read, names=replace(GATED_NAMES, norm_weight=False)
        ),
    },
    gguf={"olmo": GgufArchitecture(interleaved=True, norm="layer", norm_weight=False)},
)
