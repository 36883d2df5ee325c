"""ERNIE 4.5: dense models, and mixtures with shared experts. Neighbouring elements of a head rotate as a pair.

Routers choose by a softmax plus a bias. Layers before the first, behind the last and between every so many mixture
layers have no router.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from neuronpipe.plans.models.configuration import (
    EXPERT_NAMES,
    GATED_DEFAULTS,
    GATED_NAMES,
    gated_activation,
    gated_model,
)
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture
from neuronpipe.plans.models.mixture_configuration import Mixture, dense_experts
from neuronpipe.plans.models.spec import MAX, ModelSpec
from neuronpipe.plans.strict_json import Record

NAME = "ernie"
Has = Callable[[str], bool]

# Ernie4_5Config in transformers/models/ernie4_5/configuration_ernie4_5.py.
DENSE_DEFAULTS = {
    **GATED_DEFAULTS,
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
    "eos_token_id": 2,
}
# Ernie4_5_MoeConfig in transformers/models/ernie4_5_moe/configuration_ernie4_5_moe.py.
DEFAULTS = {
    **DENSE_DEFAULTS,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "head_dim": None,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
}
NAMES = replace(
    EXPERT_NAMES,
    choosing_bias="mlp.moe_statics.e_score_correction_bias",
    shared="mlp.shared_experts.{}_proj",
)


def _read_dense(config: Record, has: Has, choices: Choices) -> ModelSpec:
    _refuse_biases(config)
    windows = [0] * config.integer("num_hidden_layers", 1, MAX.layers)
    activation = gated_activation(config, has, choices.activation)
    return gated_model(config, choices, family=NAME, activation=activation, windows=windows)


def _refuse_biases(config: Record) -> None:
    if config.boolean("use_bias"):
        config.fail("use_bias", "is true: biases are not supported in this class")


def _read(config: Record, has: Has, choices: Choices) -> ModelSpec:
    _refuse_biases(config)
    experts = config.integer("moe_num_experts", 2, MAX.experts)
    mixture = Mixture(
        experts,
        config.integer("moe_k", 1, experts),
        shared_experts=config.integer("moe_num_shared_experts", 0, MAX.experts),
        choosing_bias=True,
    )
    layers = _dense_layers(config)
    return gated_model(
        config,
        choices,
        family=NAME,
        activation=gated_activation(config, has, choices.activation),
        windows=[0] * len(layers),
        qkv_bias=False,
        neurons="moe_intermediate_size",
        mixture=mixture,
        dense_experts=dense_experts(config, layers, "intermediate_size", "moe_intermediate_size"),
    )


def _dense_layers(config: Record) -> list[bool]:
    """Return for each layer whether it has no router."""
    layers = config.integer("num_hidden_layers", 1, MAX.layers)
    first, last = (config.integer(f"moe_layer_{end}_index", -1, MAX.layers) for end in ("start", "end"))
    last = layers - 1 if last == -1 else last
    every = config.integer("moe_layer_interval", 1, MAX.layers)
    dense = [not (first <= layer <= last and (layer + 1) % every == 0) for layer in range(layers)]
    if all(dense):
        config.fail("moe_layer_start_index", f"is {first}, so that no layer has experts")
    return dense


DENSE = Architecture(
    config_class="Ernie4_5Config", defaults=DENSE_DEFAULTS, read=_read_dense, names=GATED_NAMES, interleaved=True
)
FAMILY = Family(
    name=NAME,
    architectures={
        "Ernie4_5ForCausalLM": DENSE,
        "Ernie4_5_ForCausalLM": DENSE,  # as first published, with code of its own
        "Ernie4_5_MoeForCausalLM": Architecture(
            config_class="Ernie4_5_MoeConfig", defaults=DEFAULTS, read=_read, names=NAMES, interleaved=True
        ),
    },
    gguf=dict.fromkeys(("ernie4_5", "ernie4_5-moe"), GgufArchitecture(interleaved=True)),
)
