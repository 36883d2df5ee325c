"""SmolLM3: like Llama, but some layers, by default every fourth, are without positions."""

from __future__ import annotations

from collections.abc import Callable

from neuronpipe.plans.models.configuration import (
    FULL,
    GATED_DEFAULTS,
    GATED_HARMLESS,
    GATED_NAMES,
    SLIDING,
    biases,
    gated_activation,
    gated_model,
    sliding_windows,
)
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture
from neuronpipe.plans.models.spec import MAX, ModelSpec
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import quoted

NAME = "smollm3"

# SmolLM3Config in transformers/models/smollm3/configuration_smollm3.py.
DEFAULTS = {
    **GATED_DEFAULTS,
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2_000_000.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "layer_types": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": 128001,
}


def _read(config: Record, has: Callable[[str], bool], choices: Choices) -> ModelSpec:
    layers = config.integer("num_hidden_layers", 1, MAX.layers)
    rotary = _rotary(config, layers)
    return gated_model(
        config,
        choices,
        family=NAME,
        activation=gated_activation(config, has, choices.activation),
        windows=_windows(config, rotary),
        rotary=rotary,
        **biases(config, has),
    )


def _windows(config: Record, rotary: list[bool]) -> list[int]:
    """Return the window of each layer: with `use_sliding_window` the layers without positions have one, unless
    layer_types says otherwise."""
    if not config.boolean("use_sliding_window"):
        return [0] * len(rotary)
    usual = [FULL if rotates else SLIDING for rotates in rotary]
    config = config if config.has("layer_types") else config.replaced({"layer_types": usual})
    return sliding_windows(config, reads_layer_types=True)


def _rotary(config: Record, layers: int) -> list[bool]:
    """Return for each layer whether its heads are rotated."""
    if not config.has("no_rope_layers"):
        every = config.integer("no_rope_layer_interval", 1, MAX.layers)
        return [(layer + 1) % every != 0 for layer in range(layers)]
    flags = config.items("no_rope_layers")
    if len(flags) < layers or not all(type(flag) is int and flag in (0, 1) for flag in flags):
        config.fail("no_rope_layers", f"{quoted(flags)} is not 0 or 1 for each of {layers} layers")
    return [flag == 1 for flag in flags[:layers]]


FAMILY = Family(
    name=NAME,
    architectures={
        "SmolLM3ForCausalLM": Architecture(
            config_class="SmolLM3Config", defaults=DEFAULTS, read=_read, names=GATED_NAMES, harmless=GATED_HARMLESS
        )
    },
    gguf={"smollm3": GgufArchitecture(interleaved=True, unrotated_layer_every=4)},
)
