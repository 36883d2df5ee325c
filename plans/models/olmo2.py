"""OLMo 2 and 3: the outputs of attention and feed-forward are normed instead of their inputs.

Queries and keys are normed, all heads together. OLMo 3 has windows in three of four layers, and scales the positions of
the others alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from neuronpipe.plans.models.configuration import (
    GATED_DEFAULTS,
    GATED_NAMES,
    biases,
    gated_activation,
    gated_model,
    sliding_windows,
)
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture
from neuronpipe.plans.models.spec import MAX, ModelSpec
from neuronpipe.plans.strict_json import Record

NAME = "olmo2"
Has = Callable[[str], bool]

# Olmo2Config in transformers/models/olmo2/configuration_olmo2.py.
OLMO2_DEFAULTS = {
    **GATED_DEFAULTS,
    "vocab_size": 50304,
    "intermediate_size": 11008,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "eos_token_id": 50279,
}
LOCAL_THETA = 500_000.0
# Olmo3Config in transformers/models/olmo3/configuration_olmo3.py.
OLMO3_DEFAULTS = {**OLMO2_DEFAULTS, "rope_theta": LOCAL_THETA, "sliding_window": 4096, "layer_types": None}
NAMES = replace(
    GATED_NAMES,
    attention_norm=None,
    ffn_norm=None,
    attention_output_norm="post_attention_layernorm",
    ffn_output_norm="post_feedforward_layernorm",
    predictor=None,
)


def _olmo2(config: Record, has: Has, choices: Choices) -> ModelSpec:
    return _model(config, has, choices, [0] * config.integer("num_hidden_layers", 1, MAX.layers))


def _olmo3(config: Record, has: Has, choices: Choices) -> ModelSpec:
    config.integer("sliding_window", 1, MAX.context_tokens)
    windows = sliding_windows(config, full_layer_every=4, reads_layer_types=True)
    return _model(config, has, choices, windows, local_positions=[window > 0 for window in windows])


def _model(
    config: Record, has: Has, choices: Choices, windows: list[int], local_positions: list[bool] | None = None
) -> ModelSpec:
    return gated_model(
        config,
        choices,
        family=NAME,
        activation=gated_activation(config, has, choices.activation),
        windows=windows,
        joint_norm=True,
        norms="after",
        local_positions=local_positions,
        **biases(config, has),
    )


FAMILY = Family(
    name=NAME,
    architectures={
        "Olmo2ForCausalLM": Architecture(config_class="Olmo2Config", defaults=OLMO2_DEFAULTS, read=_olmo2, names=NAMES),
        "Olmo3ForCausalLM": Architecture(
            config_class="Olmo3Config",
            defaults=OLMO3_DEFAULTS,
            read=_olmo3,
            names=NAMES,
            local_theta=LOCAL_THETA,
        ),
    },
    gguf={
        "olmo2": GgufArchitecture(
            interleaved=False, norms="after", joint_norm=True, full_layer_every=4, local_theta=0.0
        )
    },
)
