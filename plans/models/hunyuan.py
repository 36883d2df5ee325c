"""Hunyuan: dense models, and mixtures with a shared expert. Queries and keys are normed after they are rotated.

Rotary positions of the kind "dynamic" with `alpha` have a fixed base, rope_theta * alpha^(d / (d - 2)) for heads of
width d. Published configurations give a number for each layer where the class takes one; all layers must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from neuronpipe.plans.models.configuration import (
    EXPERT_NAMES,
    GATED_DEFAULTS,
    GATED_NAMES,
    biases,
    gated_activation,
    gated_model,
)
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture
from neuronpipe.plans.models.mixture_configuration import Mixture
from neuronpipe.plans.models.spec import MAX, ModelSpec
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import quoted

NAME = "hunyuan"
Has = Callable[[str], bool]

# HunYuanDenseV1Config in transformers/models/hunyuan_v1_dense/configuration_hunyuan_v1_dense.py.
DENSE_DEFAULTS = {
    **GATED_DEFAULTS,
    "vocab_size": 290943,
    "intermediate_size": 11008,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "eos_token_id": 2,
}
# HunYuanMoEV1Config in transformers/models/hunyuan_v1_moe/configuration_hunyuan_v1_moe.py.
DEFAULTS = {**DENSE_DEFAULTS, "num_experts": 1, "moe_topk": 1}
DENSE_NAMES = replace(GATED_NAMES, query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")
NAMES = replace(
    EXPERT_NAMES,
    query_norm=DENSE_NAMES.query_norm,
    key_norm=DENSE_NAMES.key_norm,
    router="mlp.gate.wg",
    shared="mlp.shared_mlp.{}_proj",
)


def _read_dense(config: Record, has: Has, choices: Choices) -> ModelSpec:
    return _model(config, has, choices, None)


def _read(config: Record, has: Has, choices: Choices) -> ModelSpec:
    experts = _uniform(config, "num_experts", 2, MAX.experts)
    return _model(config, has, choices, Mixture(experts, _uniform(config, "moe_topk", 1, experts), shared_experts=1))


def _model(config: Record, has: Has, choices: Choices, mixture: Mixture | None) -> ModelSpec:
    return gated_model(
        config,
        choices,
        family=NAME,
        activation=gated_activation(config, has, choices.activation),
        windows=[0] * config.integer("num_hidden_layers", 1, MAX.layers),
        **biases(config, has),
        head_norm=True,
        norm_after_rotation=True,
        mixture=mixture,
    )


def _uniform(config: Record, field: str, minimum: int, maximum: int) -> int:
    """Return a whole number, or the number that a list has for every layer."""
    value = config.value(field)
    if isinstance(value, list):
        if not value or any(number != value[0] for number in value):
            config.fail(field, f"{quoted(value)} differs between layers: not supported")
        return Record({field: value[0]}, config.where).integer(field, minimum, maximum)
    return config.integer(field, minimum, maximum)


FAMILY = Family(
    name=NAME,
    architectures={
        "HunYuanDenseV1ForCausalLM": Architecture(
            config_class="HunYuanDenseV1Config",
            defaults=DENSE_DEFAULTS,
            read=_read_dense,
            names=DENSE_NAMES,
        ),
        "HunYuanMoEV1ForCausalLM": Architecture(
            config_class="HunYuanMoEV1Config", defaults=DEFAULTS, read=_read, names=NAMES
        ),
    },
    gguf=dict.fromkeys(("hunyuan-dense", "hunyuan-moe"), GgufArchitecture(interleaved=False, norm_after_rotation=True)),
)
