"""Bamba: Mamba-2 as in Granite's hybrids, attention in listed layers, and a gated feed-forward in every layer.

Attention rotates the first half of each head. Configurations do not say it: transformers' code sets it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from neuronpipe.plans.models.configuration import GATED_NAMES, gated_activation, gated_model
from neuronpipe.plans.models.family import Architecture, Choices, Family
from neuronpipe.plans.models.granite_hybrid import mamba_sizes, require_unlimited_time
from neuronpipe.plans.models.recurrent_sizes import Mixer
from neuronpipe.plans.models.recurrent_tensors import mamba_tensors
from neuronpipe.plans.models.spec import MAX, ModelSpec
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import quoted

NAME = "bamba"

# BambaConfig in transformers/models/bamba/configuration_bamba.py.
DEFAULTS = {
    "vocab_size": 128_000,
    "tie_word_embeddings": False,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262_144,
    "attn_layer_indices": None,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": None,
    "rope_theta": 10_000.0,
    "rope_parameters": None,
    "attention_bias": False,
    "mlp_bias": False,
    "eos_token_id": 2,
}
ROTATED = {"partial_rotary_factor": 0.5}  # whatever a file says
NAMES = replace(
    GATED_NAMES,
    output_norm="model.final_layernorm",
    ffn_norm="pre_ff_layernorm",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    predictor=None,
    recurrent=lambda model, layer: mamba_tensors(model, "mamba"),
)


def _read(config: Record, has: Callable[[str], bool], choices: Choices) -> ModelSpec:
    for key in ("attention_bias", "mlp_bias", "mamba_proj_bias"):
        if config.boolean(key):
            config.fail(key, "is true: not supported in this class")
    require_unlimited_time(config)
    mixers = _mixers(config)
    return gated_model(
        config,
        choices,
        family=NAME,
        activation=gated_activation(config, has, choices.activation),
        windows=[0] * len(mixers),
        qkv_bias=False,
        mixers=mixers,
        further=mamba_sizes(config) if "mamba2" in mixers else {},
    )


def _mixers(config: Record) -> list[Mixer]:
    layers, key = config.integer("num_hidden_layers", 1, MAX.layers), "attn_layer_indices"
    listed = config.items(key) if config.has(key) else []
    if not all(type(layer) is int and 0 <= layer < layers for layer in listed):
        config.fail(key, f"{quoted(listed)} is no list of layers from 0 to {layers - 1}")
    return ["attention" if layer in listed else "mamba2" for layer in range(layers)]


FAMILY = Family(
    name=NAME,
    architectures={
        "BambaForCausalLM": Architecture(
            config_class="BambaConfig",
            defaults=DEFAULTS,
            read=_read,
            names=NAMES,
            partial_rotary=True,
            constants=ROTATED,
        ),
    },
)
