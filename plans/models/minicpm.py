"""MiniCPM and MiniCPM-S: like Llama, with three scales that keep activations similar at any width and depth (muP).

The embedding is multiplied by `scale_emb`, the outputs of attention and feed-forward by `scale_depth` / sqrt(layers);
logits are divided by `hidden_size` / `dim_model_base`. MiniCPM-S has ReLU with a threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from neuronpipe.plans.models.configuration import (
    GATED_DEFAULTS,
    GATED_HARMLESS,
    GATED_NAMES,
    gated_activation,
    gated_model,
    refuse_biases,
)
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture
from neuronpipe.plans.models.spec import MAX, MAX_SCALE, MIN_SCALE, ModelSpec, SpecError
from neuronpipe.plans.strict_json import Record

NAME = "minicpm"

# MiniCPMConfig in configuration_minicpm.py of the models' own repositories (openbmb/MiniCPM-S-1B-sft).
DEFAULTS = {
    **GATED_DEFAULTS,
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "scale_emb": 1,
    "scale_depth": 1,
    "dim_model_base": 1,
}


def _read(config: Record, has: Callable[[str], bool], choices: Choices) -> ModelSpec:
    refuse_biases(config, has)
    if config.boolean("attention_bias"):
        config.fail("attention_bias", "is true, which means a bias of self_attn.o_proj as well: not supported")
    layers = config.integer("num_hidden_layers", 1, MAX.layers)
    model = gated_model(
        config,
        choices,
        family=NAME,
        activation=gated_activation(config, has, choices.activation),
        windows=[0] * layers,
        qkv_bias=False,
    )
    try:
        return replace(
            model,
            embedding_scale=config.number("scale_emb", MIN_SCALE, MAX_SCALE),
            residual_scale=config.number("scale_depth", MIN_SCALE, MAX_SCALE) / math.sqrt(layers),
            logit_scale=config.integer("dim_model_base", 1, MAX.width) / model.width,
        )
    except SpecError as error:
        config.fail(error.field, error.complaint)


FAMILY = Family(
    name=NAME,
    architectures={
        "MiniCPMForCausalLM": Architecture(
            config_class="MiniCPMConfig", defaults=DEFAULTS, read=_read, names=GATED_NAMES, harmless=GATED_HARMLESS
        ),
    },
    gguf={
        "minicpm": GgufArchitecture(
            interleaved=True, has_scales=True, required_scales=("embedding_scale", "residual_scale", "logit_scale")
        ),
    },
)
