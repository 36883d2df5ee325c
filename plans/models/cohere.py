"""Command R, R7B, A and Aya: attention and feed-forward in parallel, after one LayerNorm without bias.

Classes of 2024 have rotary positions in every layer. The second generation has them in layers with windows; each fourth
layer has neither. Norms of queries and keys, as in Command R+, are not supported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from neuronpipe.plans.models.configuration import (
    GATED_DEFAULTS,
    GATED_NAMES,
    build_spec,
    gated_activation,
    sizes,
    sliding_windows,
)
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture
from neuronpipe.plans.models.spec import MAX, MAX_SCALE, MIN_SCALE, LayerKind, ModelSpec, runs_of
from neuronpipe.plans.strict_json import Record

NAME = "cohere"
Has = Callable[[str], bool]

# Cohere2Config in transformers/models/cohere2/configuration_cohere2.py.
COHERE2_DEFAULTS = {
    **{name: value for name, value in GATED_DEFAULTS.items() if name != "rms_norm_eps"},
    "vocab_size": 256_000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": None,  # as many as heads
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "layer_types": None,
    "eos_token_id": 255_001,
}
# CohereConfig in transformers/models/cohere/configuration_cohere.py.
COHERE_DEFAULTS = {
    **{name: value for name, value in COHERE2_DEFAULTS.items() if name not in ("sliding_window", "layer_types")},
    "rope_theta": 500_000.0,
    "use_qk_norm": False,
}
FULL_LAYER_EVERY = 4  # unless `sliding_window_pattern` says otherwise
NAMES = replace(GATED_NAMES, ffn_norm="input_layernorm", norm_bias=False)


def _cohere(config: Record, has: Has, choices: Choices) -> ModelSpec:
    if config.has("use_qk_norm") and config.boolean("use_qk_norm"):
        config.fail("use_qk_norm", "is true: norms of queries and keys are not supported in this class")
    return _model(config, has, choices, (LayerKind(config.integer("num_hidden_layers", 1, MAX.layers)),))


def _cohere2(config: Record, has: Has, choices: Choices) -> ModelSpec:
    if not config.has("sliding_window"):
        config.fail("sliding_window", "is missing: not supported in this class")
    pattern = "sliding_window_pattern"
    every = config.integer(pattern, 1, MAX.layers) if config.has(pattern) else FULL_LAYER_EVERY
    windows = sliding_windows(config, full_layer_every=every, reads_layer_types=True)
    return _model(config, has, choices, runs_of(windows, [window > 0 for window in windows]))


def _model(config: Record, has: Has, choices: Choices, layer_kinds: tuple[LayerKind, ...]) -> ModelSpec:
    bias = config.boolean("attention_bias")
    return build_spec(
        config,
        **sizes(config, choices),
        family=NAME,
        layer_kinds=layer_kinds,
        norm="layer",
        norm_epsilon=config.number("layer_norm_eps", 0.0, 1.0),
        activation=gated_activation(config, has, choices.activation),
        qkv_bias=bias,
        output_bias=bias,
        parallel=True,
        logit_scale=config.number("logit_scale", MIN_SCALE, MAX_SCALE),
    )


GGUF = GgufArchitecture(interleaved=True, norm="layer", norm_bias=False, parallel="always", multiplies_logits=True)
FAMILY = Family(
    name=NAME,
    architectures={
        "CohereForCausalLM": Architecture(
            config_class="CohereConfig", defaults=COHERE_DEFAULTS, read=_cohere, names=NAMES, interleaved=True
        ),
        "Cohere2ForCausalLM": Architecture(
            config_class="Cohere2Config", defaults=COHERE2_DEFAULTS, read=_cohere2, names=NAMES, interleaved=True
        ),
    },
    gguf={
        "command-r": GGUF,
        "cohere2": replace(GGUF, full_layer_every=FULL_LAYER_EVERY, rotates_full_layers=False, window_tokens=None),
    },
)
