"""Granite 3, dense and as mixtures: like Llama, with factors of embeddings, attention scores, additions to the residual
stream, and logits. Checkpoints of mixtures have gate and up of all experts of a layer in one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from neuronpipe.plans.models.configuration import (
    GATED_HARMLESS,
    GATED_NAMES,
    biases,
    gated_activation,
    gated_model,
)
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture
from neuronpipe.plans.models.llama import LLAMA_DEFAULTS
from neuronpipe.plans.models.mixture_configuration import Mixture
from neuronpipe.plans.models.spec import MAX, MAX_SCALE, MIN_SCALE, ModelSpec, SpecError
from neuronpipe.plans.strict_json import Record

NAME = "granite"

# GraniteConfig in transformers/models/granite/configuration_granite.py.
DEFAULTS = {
    **LLAMA_DEFAULTS,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}


# GraniteMoeConfig in transformers/models/granitemoe/configuration_granitemoe.py.
MOE_DEFAULTS = {
    **{name: value for name, value in DEFAULTS.items() if name != "mlp_bias"},
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
MOE_NAMES = replace(
    GATED_NAMES,
    router="block_sparse_moe.router.layer",
    gate_up="block_sparse_moe.input_linear",
    down="block_sparse_moe.output_linear",
    stacked=True,
    predictor=None,
)


def _read(config: Record, has: Callable[[str], bool], choices: Choices) -> ModelSpec:
    return _model(config, has, choices, None)


def _read_moe(config: Record, has: Callable[[str], bool], choices: Choices) -> ModelSpec:
    experts = config.integer("num_local_experts", 2, MAX.experts)
    return _model(config, has, choices, Mixture(experts, config.integer("num_experts_per_tok", 1, experts)))


def _model(config: Record, has: Callable[[str], bool], choices: Choices, mixture: Mixture | None) -> ModelSpec:
    model = gated_model(
        config,
        choices,
        family=NAME,
        activation=gated_activation(config, has, choices.activation),
        windows=[0] * config.integer("num_hidden_layers", 1, MAX.layers),
        mixture=mixture,
        **biases(config, has),
    )

    return with_factors(config, model)


def with_factors(config: Record, model: ModelSpec) -> ModelSpec:
    """Return the model with the factors of Granite's classes."""

    def factor(field: str) -> float:
        return config.number(field, MIN_SCALE, MAX_SCALE)

    try:
        return replace(
            model,
            embedding_scale=factor("embedding_multiplier"),
            residual_scale=factor("residual_multiplier"),
            logit_scale=1 / factor("logits_scaling"),
            attention_scale=factor("attention_multiplier") * math.sqrt(model.head_width),
        )
    except SpecError as error:
        config.fail(error.field, error.complaint)


FAMILY = Family(
    name=NAME,
    architectures={
        "GraniteForCausalLM": Architecture(
            config_class="GraniteConfig", defaults=DEFAULTS, read=_read, names=GATED_NAMES, harmless=GATED_HARMLESS
        ),
        "GraniteMoeForCausalLM": Architecture(
            config_class="GraniteMoeConfig", defaults=MOE_DEFAULTS, read=_read_moe, names=MOE_NAMES
        ),
    },
    gguf={
        "granite": GgufArchitecture(interleaved=True, has_scales=True),
        "granitemoe": GgufArchitecture(interleaved=True, has_scales=True),
    },
)
