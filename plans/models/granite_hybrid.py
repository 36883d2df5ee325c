"""Granite 4 hybrids: most layers are Mamba-2, the others attention without positions; four factors as in Granite.

A mixture has shared experts beside the chosen ones; without experts these are the feed-forward. Its gate and up lie in
one tensor. Small models of this class have attention only, with rotary positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from neuronpipe.plans.models.configuration import FULL, GATED_NAMES, gated_activation, gated_model, layer_mixers
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture, TensorNames
from neuronpipe.plans.models.granite import with_factors
from neuronpipe.plans.models.mixture_configuration import Mixture
from neuronpipe.plans.models.recurrent_sizes import Mixer
from neuronpipe.plans.models.recurrent_tensors import mamba_tensors
from neuronpipe.plans.models.spec import MAX, MAX_CONVOLUTION, ModelSpec
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import quoted

NAME = "granite_hybrid"
MIXERS: dict[str, Mixer] = {
    "linear_attention": "mamba2",
    "mamba": "mamba2",
    FULL: "attention",
    "attention": "attention",
}
Has = Callable[[str], bool]

# GraniteMoeHybridConfig in transformers/models/granitemoehybrid/configuration_granitemoehybrid.py.
DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "rope_parameters": None,
    "attention_bias": False,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "position_embedding_type": None,
    "layer_types": None,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": None,
    "eos_token_id": 2,
}
_SHARED = {"gate": "shared_mlp.input_linear", "up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"}


def _names(config: Record) -> TensorNames:
    common = replace(GATED_NAMES, predictor=None, recurrent=lambda model, layer: mamba_tensors(model, "mamba"))
    if config.integer("num_local_experts", 0, MAX.experts) == 0:
        return replace(common, gate_up=_SHARED["gate"], down=_SHARED["down"])
    return replace(
        common,
        router="block_sparse_moe.router.layer",
        gate_up="block_sparse_moe.input_linear",
        down="block_sparse_moe.output_linear",
        stacked=True,
        shared=_SHARED,
    )


def _read(config: Record, has: Has, choices: Choices) -> ModelSpec:
    for key in ("attention_bias", "mamba_proj_bias"):
        if config.boolean(key):
            config.fail(key, "is true: not supported in this class")
    require_unlimited_time(config)
    mixers: list[Mixer] = ["mamba2"] * config.integer("num_hidden_layers", 1, MAX.layers)
    if config.has("layer_types"):
        mixers = layer_mixers(config, MIXERS)
    has_positions = config.has("position_embedding_type") and config.text("position_embedding_type") == "rope"
    experts = config.integer("num_local_experts", 0, MAX.experts)
    mixture = None
    if experts:
        shared, of_expert = (
            config.integer(key, 1, MAX.neurons) for key in ("shared_intermediate_size", "intermediate_size")
        )
        chosen = config.integer("num_experts_per_tok", 1, experts)
        mixture = Mixture(experts, chosen, shared_experts=-(-shared // of_expert))
    model = gated_model(
        config,
        choices,
        family=NAME,
        activation=gated_activation(config, has, choices.activation),
        windows=[0] * len(mixers),
        rotary=[has_positions or mixer != "attention" for mixer in mixers],
        qkv_bias=False,
        neurons="intermediate_size" if experts else "shared_intermediate_size",
        mixture=mixture,
        mixers=mixers,
        further=mamba_sizes(config) if "mamba2" in mixers else {},
    )
    return with_factors(config, model)


def require_unlimited_time(config: Record) -> None:
    """Raise UserError if the time of a token has bounds."""
    if not config.has("time_step_limit"):
        return
    limits = config.items("time_step_limit")
    endless = ({"__float__": "Infinity"}, float("inf"))
    if len(limits) != 2 or limits[0] != 0 or limits[1] not in endless:
        config.fail("time_step_limit", f"{quoted(limits)} is not supported; 0 and Infinity are")


def mamba_sizes(config: Record) -> dict[str, Any]:
    """Return the fields of ModelSpec that Mamba-2 needs, from the keys that Bamba has too."""
    heads, groups = (config.integer(key, 1, MAX.query_heads) for key in ("mamba_n_heads", "mamba_n_groups"))
    inner = config.integer("mamba_expand", 1, 1 << 10) * config.integer("hidden_size", 1, MAX.width)
    stated = config.value("mamba_d_head")
    if inner % heads or (stated != "auto" and stated != inner // heads):
        config.fail("mamba_d_head", f"{quoted(stated)} heads of {heads} are not mamba_expand * hidden_size, {inner}")
    return {
        "state_heads": heads,
        "state_key_heads": groups,
        "state_key_width": config.integer("mamba_d_state", 1, MAX.head_width),
        "state_value_width": inner // heads,
        "state_norm_groups": groups,
        "convolution_tokens": config.integer("mamba_d_conv", 1, MAX_CONVOLUTION),
        "convolution_bias": config.boolean("mamba_conv_bias"),
    }


FAMILY = Family(
    name=NAME,
    architectures={
        "GraniteMoeHybridForCausalLM": Architecture(
            config_class="GraniteMoeHybridConfig", defaults=DEFAULTS, read=_read, names=_names
        ),
    },
    gguf={
        "granitehybrid": GgufArchitecture(interleaved=True, has_scales=True, recurrent="mamba2", rotated=None),
    },
)
