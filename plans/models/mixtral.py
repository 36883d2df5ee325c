"""Mixtral and TurboSparse-Mixtral: Llama with experts, of which a router chooses some for each token and layer.

Mixtral takes a softmax over all experts and divides the chosen experts' values by their sum, which equals a softmax
over the chosen experts. The files of TurboSparse-Mixtral say relu, as Bamboo's do, but its class applies relu to gate
and to up (dReLU). Each of its experts has a predictor in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from neuronpipe.plans.models.configuration import (
    GATED_DEFAULTS,
    GATED_NAMES,
    gated_activation,
    gated_model,
    sliding_windows,
)
from neuronpipe.plans.models.family import SAY_WHICH, Architecture, Choices, Family
from neuronpipe.plans.models.mixture_configuration import Mixture
from neuronpipe.plans.models.spec import MAX, Activation, ModelSpec
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import quoted

NAME = "mixtral"
Has = Callable[[str], bool]

# MixtralConfig in transformers/models/mixtral/configuration_mixtral.py.
DEFAULTS = {
    **GATED_DEFAULTS,
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096 * 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "eos_token_id": 2,
}
NAMES = replace(
    GATED_NAMES,
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{}.",
    gate="w1",
    up="w3",
    down="w2",
    predictor=None,
)


def _mixture(config: Record) -> Mixture:
    experts = config.integer("num_local_experts", 2, MAX.experts)
    return Mixture(experts, config.integer("num_experts_per_tok", 1, experts))


def _model(config: Record, choices: Choices, activation: Activation) -> ModelSpec:
    windows = sliding_windows(config, reads_layer_types=False)
    return gated_model(
        config, choices, family=NAME, activation=activation, windows=windows, qkv_bias=False, mixture=_mixture(config)
    )


def _mixtral(config: Record, has: Has, choices: Choices) -> ModelSpec:
    return _model(config, choices, gated_activation(config, has, choices.activation))


def _turbosparse(config: Record, has: Has, choices: Choices) -> ModelSpec:
    if choices.activation is not None:
        return _model(config, choices, choices.activation)
    if (stated := config.text("hidden_act")) not in ("relu", "drelu"):
        config.fail(
            "hidden_act", f"is {quoted(stated)}, but TurboSparse-Mixtral says relu and means drelu; {SAY_WHICH}"
        )
    return _model(config, choices, "drelu")


FAMILY = Family(
    name=NAME,
    architectures={
        "MixtralForCausalLM": Architecture(config_class="MixtralConfig", defaults=DEFAULTS, read=_mixtral, names=NAMES),
        # TurboSparseMixtralConfig in the model's own repository, PowerInfer/TurboSparse-Mixtral.
        "TurboSparseMixtralForCausalLM": Architecture(
            config_class="TurboSparseMixtralConfig",
            defaults=DEFAULTS,
            read=_turbosparse,
            names=replace(NAMES, predictor="predictor.fc{}"),
        ),
    },
)
