"""Arcee's foundation models (AFM): like Llama, but the feed-forward has only Up and Down, with a squared ReLU between
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from neuronpipe.plans.models.configuration import (
    GATED_DEFAULTS,
    GATED_NAMES,
    biases,
    build_spec,
    sizes,
)
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture, named_activation
from neuronpipe.plans.models.spec import MAX, LayerKind, ModelSpec
from neuronpipe.plans.strict_json import Record

NAME = "arcee"

# ArceeConfig in transformers/models/arcee/configuration_arcee.py.
DEFAULTS = {
    **GATED_DEFAULTS,
    "vocab_size": 32000,
    "hidden_size": 2560,
    "intermediate_size": 18432,
    "num_key_value_heads": None,  # as many as heads
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "eos_token_id": 128001,
}


def _read(config: Record, has: Callable[[str], bool], choices: Choices) -> ModelSpec:
    return build_spec(
        config,
        **sizes(config, choices),
        family=NAME,
        layer_kinds=(LayerKind(config.integer("num_hidden_layers", 1, MAX.layers)),),
        norm_epsilon=config.number("rms_norm_eps", 0.0, 1.0),
        activation=choices.activation or named_activation(config, "hidden_act", relu_may_mean_drelu=False),
        gated=False,
        **biases(config, has),
    )


FAMILY = Family(
    name=NAME,
    architectures={
        "ArceeForCausalLM": Architecture(
            config_class="ArceeConfig", defaults=DEFAULTS, read=_read, names=replace(GATED_NAMES, gate=None)
        ),
    },
    gguf={"arcee": GgufArchitecture(interleaved=True, gated=False, activation="relu2")},
)
