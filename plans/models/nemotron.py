"""Nemotron and Minitron: LayerNorm whose stored weights are 1 too small, rotary positions on a part of each head, a
feed-forward of Up and Down with a squared ReLU between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from neuronpipe.plans.models.configuration import GATED_NAMES, build_spec, sizes
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture, named_activation
from neuronpipe.plans.models.spec import MAX, LayerKind, ModelSpec
from neuronpipe.plans.strict_json import Record

NAME = "nemotron"

# NemotronConfig in transformers/models/nemotron/configuration_nemotron.py.
DEFAULTS = {
    "vocab_size": 256_000,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 32,
    "num_attention_heads": 48,
    "head_dim": None,  # hidden_size / num_attention_heads
    "num_key_value_heads": None,  # as many as heads
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "rope_parameters": None,
    "partial_rotary_factor": 0.5,
    "attention_bias": False,
    "mlp_bias": False,
    "eos_token_id": 3,
}

NAMES = replace(GATED_NAMES, gate=None, query_norm=None, key_norm=None)


def _read(config: Record, has: Callable[[str], bool], choices: Choices) -> ModelSpec:
    attention_bias = config.boolean("attention_bias")
    return build_spec(
        config,
        **sizes(config, choices),
        family=NAME,
        layer_kinds=(LayerKind(config.integer("num_hidden_layers", 1, MAX.layers)),),
        norm="layer",
        norm_epsilon=config.number("norm_eps", 0.0, 1.0),
        activation=choices.activation or named_activation(config, "hidden_act", relu_may_mean_drelu=False),
        gated=False,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        ffn_bias=config.boolean("mlp_bias"),
    )


FAMILY = Family(
    name=NAME,
    architectures={
        "NemotronForCausalLM": Architecture(
            config_class="NemotronConfig",
            defaults=DEFAULTS,
            read=_read,
            names=NAMES,
            norm_offset=1.0,  # NemotronLayerNorm1P
            partial_rotary=True,
        ),
    },
    # llama.cpp's converter adds the missing 1 to norms, in 16 bits: vectors differ from the checkpoint's by rounding.
    gguf={
        "nemotron": GgufArchitecture(
            interleaved=False, norm="layer", gated=False, partial_rotary=True, activation="relu2"
        )
    },
)
