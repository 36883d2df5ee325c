"""EXAONE 4: the outputs of attention and feed-forward are normed instead of their inputs, and so is each head.

The 32B has windows in three of four layers, and its other layers are not rotated. A model without windows rotates all.
"""

from __future__ import annotations

from collections.abc import Callable

from neuronpipe.plans.models.configuration import GATED_DEFAULTS, gated_activation, gated_model, sliding_windows
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture
from neuronpipe.plans.models.olmo2 import NAMES
from neuronpipe.plans.models.spec import MAX, ModelSpec
from neuronpipe.plans.strict_json import Record

NAME = "exaone4"
FULL_LAYER_EVERY = 4

# Exaone4Config in transformers/models/exaone4/configuration_exaone4.py.
DEFAULTS = {
    **GATED_DEFAULTS,
    "vocab_size": 102_400,
    "intermediate_size": 16384,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": FULL_LAYER_EVERY,
    "layer_types": None,
    "eos_token_id": 2,
}


def _read(config: Record, has: Callable[[str], bool], choices: Choices) -> ModelSpec:
    windows = _windows(config)
    return gated_model(
        config,
        choices,
        family=NAME,
        activation=gated_activation(config, has, choices.activation),
        windows=windows,
        rotary=[window > 0 for window in windows] if config.has("sliding_window") else None,
        head_norm=True,
        norms="after",
    )


def _windows(config: Record) -> list[int]:
    """Return the window of each layer. A pattern of letters, as in LLLG, needs `layer_types`, as in transformers."""
    if config.has("layer_types") or not config.has("sliding_window"):
        return sliding_windows(config, reads_layer_types=True)
    every = config.integer("sliding_window_pattern", 1, MAX.layers)
    return sliding_windows(config, full_layer_every=every, reads_layer_types=True)


FAMILY = Family(
    name=NAME,
    architectures={
        "Exaone4ForCausalLM": Architecture(config_class="Exaone4Config", defaults=DEFAULTS, read=_read, names=NAMES)
    },
    gguf={
        "exaone4": GgufArchitecture(
            interleaved=False, norms="after", full_layer_every=FULL_LAYER_EVERY, rotates_full_layers=False
        )
    },
)
