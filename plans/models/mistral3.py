"""Mistral Small 3.1 and 3.2, and Ministral 3: models like Mistral, most of them beside a vision tower.

Ministral 3 multiplies queries by a factor that grows with the position from the end of YaRN's original context on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from neuronpipe.plans.models.configuration import (
    GATED_HARMLESS,
    GATED_NAMES,
    gated_activation,
    gated_model,
    refuse_biases,
    sliding_windows,
)
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture
from neuronpipe.plans.models.gemma import OTHER_TOWERS
from neuronpipe.plans.models.llama import MISTRAL_DEFAULTS
from neuronpipe.plans.models.spec import MAX, MAX_THRESHOLD, ModelSpec
from neuronpipe.plans.strict_json import Record

NAME = "mistral3"
ORIGINAL = "original_max_position_embeddings"

# Ministral3Config in transformers/models/ministral3/configuration_ministral3.py.
MINISTRAL3_DEFAULTS = {
    **MISTRAL_DEFAULTS,
    "vocab_size": 131_072,
    "num_hidden_layers": 34,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        ORIGINAL: 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
# The text configuration of Mistral3Config in transformers/models/mistral3/configuration_mistral3.py. Without a word
# about it, the output is tied if the checkpoint has none.
MISTRAL3_DEFAULTS = {
    **MINISTRAL3_DEFAULTS,
    "hidden_size": 5120,
    "intermediate_size": 32_768,
    "num_hidden_layers": 40,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000_000.0,
    "rope_parameters": None,
    "tie_word_embeddings": None,
}


def _read(config: Record, has: Callable[[str], bool], choices: Choices) -> ModelSpec:
    refuse_biases(config, has)
    if not config.has("tie_word_embeddings"):
        is_tied = not any(map(has, ("lm_head.weight", "language_model.lm_head.weight")))
        config = config.replaced({"tie_word_embeddings": is_tied})
    model = gated_model(
        config,
        choices,
        family=NAME,
        activation=gated_activation(config, has, choices.activation),
        windows=sliding_windows(config, reads_layer_types=False),
        qkv_bias=False,
    )
    return _with_query_growth(config, model)


def _with_query_growth(config: Record, model: ModelSpec) -> ModelSpec:
    """Return the model with the factor of queries by position, if the configuration states one."""
    factor = "llama_4_scaling_beta"
    scalings = (config.record(field) for field in ("rope_parameters", "rope_scaling") if config.has(field))
    scaling = next((scaling for scaling in scalings if scaling.has(factor)), None)
    if scaling is None or not (growth := scaling.number(factor, 0.0, MAX_THRESHOLD)):
        return model
    tokens = scaling.integer(ORIGINAL, 1, MAX.context_tokens)
    return replace(model, query_growth=growth, query_growth_tokens=tokens)


FAMILY = Family(
    name=NAME,
    architectures={
        "Ministral3ForCausalLM": Architecture(
            config_class="Ministral3Config",
            defaults=MINISTRAL3_DEFAULTS,
            read=_read,
            names=GATED_NAMES,
            harmless=GATED_HARMLESS,
        ),
        "Mistral3ForConditionalGeneration": Architecture(
            config_class="Mistral3Config",
            defaults=MISTRAL3_DEFAULTS,
            read=_read,
            names=GATED_NAMES,
            harmless=rf"{GATED_HARMLESS}|{OTHER_TOWERS}",
            part="text_config",
        ),
    },
    gguf={"mistral3": GgufArchitecture(interleaved=True, yarn_multiplier=True)},
)
