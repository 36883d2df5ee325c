"""Qwen3-Next, Qwen3.5 and Qwen3.6: three of four layers are gated DeltaNet, attention has a gate and rotates a quarter.

The stored weights of norms lack 1, except those of DeltaNet's outputs. Qwen3-Next stores the input of DeltaNet in two
tensors, a key head's rows together. Published checkpoints have a vision tower, which is left out, and a draft layer
with attention, which transformers leaves out. The layer reads hidden states behind the output norm: with these more of
its drafts were accepted in llama.cpp (pull request 24025). Their mixtures store the experts of a layer in one tensor,
transformers saves them one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from neuronpipe.plans.models.configuration import (
    FULL,
    GATED_NAMES,
    gated_activation,
    gated_model,
    layer_mixers,
    refuse_biases,
)
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture, TensorNames
from neuronpipe.plans.models.mixture_configuration import Mixture, dense_experts, qwen_layers
from neuronpipe.plans.models.qwen3 import MOE_NAMES
from neuronpipe.plans.models.recurrent_sizes import Mixer
from neuronpipe.plans.models.recurrent_tensors import deltanet_tensors, joined_deltanet_tensors
from neuronpipe.plans.models.spec import MAX, MAX_CONVOLUTION, ModelSpec
from neuronpipe.plans.strict_json import Record

NAME = "qwen3_next"
MIXERS: dict[str, Mixer] = {"linear_attention": "deltanet", FULL: "attention"}
INTERVAL = "full_attention_interval"  # each layer of this number has attention, unless layer_types says otherwise
Has = Callable[[str], bool]

# Qwen3NextConfig in transformers/models/qwen3_next/configuration_qwen3_next.py.
DEFAULTS = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "rope_parameters": None,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
    "mlp_only_layers": None,
    "layer_types": None,
    INTERVAL: 4,
    "eos_token_id": None,
}
# Qwen3_5TextConfig in transformers/models/qwen3_5/configuration_qwen3_5.py.
QWEN35_DEFAULTS = {
    **{
        name: value
        for name, value in DEFAULTS.items()
        if "expert" not in name and name not in ("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob")
    },
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
del QWEN35_DEFAULTS["moe_intermediate_size"]
# Qwen3_5MoeTextConfig in transformers/models/qwen3_5_moe/configuration_qwen3_5_moe.py.
QWEN35_MOE_DEFAULTS = {
    **{
        name: value
        for name, value in DEFAULTS.items()
        if name not in ("intermediate_size", "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob")
    },
    "vocab_size": 248_320,
    "num_hidden_layers": 40,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}
DRAFT = "mtp.layers.0."
DRAFT_NAMES: dict[str, Any] = {
    "draft_layer": "mtp.layers.{}.",
    "draft_input": "fc",
    "draft_embedding_norm": "pre_fc_norm_embedding",
    "draft_hidden_norm": "pre_fc_norm_hidden",
    "draft_output_norm": "norm",
}
FUSED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
OWN_NAMES = replace(
    MOE_NAMES,
    **DRAFT_NAMES,
    fused_experts=FUSED,
    recurrent=lambda model, layer: joined_deltanet_tensors(model, "linear_attn"),
)
QWEN35_NAMES = replace(
    GATED_NAMES,
    **DRAFT_NAMES,
    predictor=None,
    recurrent=lambda model, layer: deltanet_tensors(model, "linear_attn"),
)
QWEN35_MOE_NAMES = replace(MOE_NAMES, **DRAFT_NAMES, fused_experts=FUSED, recurrent=QWEN35_NAMES.recurrent)
LEFT_OUT = r"(model\.)?(mtp|visual)\..*"
OF_ITS_OWN = ("mtp.embed_tokens.weight", "mtp.lm_head.weight")  # with them the draft layer is left out


def _next(config: Record, has: Has, choices: Choices) -> ModelSpec:
    return _mixture(config, has, choices, qwen_layers(config), normalized_shares=config.boolean("norm_topk_prob"))


def _qwen35_moe(config: Record, has: Has, choices: Choices) -> ModelSpec:
    layers = config.integer("num_hidden_layers", 1, MAX.layers)
    return _mixture(config, has, choices, [False] * layers, normalized_shares=True)


def _mixture(config: Record, has: Has, choices: Choices, is_dense: list[bool], *, normalized_shares: bool) -> ModelSpec:
    experts = config.integer("num_experts", 2, MAX.experts)
    shared, of_expert = (
        config.integer(key, 1, MAX.neurons) for key in ("shared_expert_intermediate_size", "moe_intermediate_size")
    )
    mixture = Mixture(
        experts,
        config.integer("num_experts_per_tok", 1, experts),
        shared_experts=-(-shared // of_expert),
        shared_gate=True,
        normalized_shares=normalized_shares,
    )
    of_dense = dense_experts(config, is_dense, "intermediate_size", "moe_intermediate_size")
    return _model(config, has, choices, neurons="moe_intermediate_size", mixture=mixture, of_dense=of_dense)


def _qwen35(config: Record, has: Has, choices: Choices) -> ModelSpec:
    return _model(config, has, choices)


def _model(
    config: Record, has: Has, choices: Choices, *, of_dense: list[int] | None = None, **mixture: Any
) -> ModelSpec:
    refuse_biases(config, has)
    if config.boolean("attention_bias"):
        config.fail("attention_bias", "is true: not supported in this class")
    mixers = layer_mixers(config, MIXERS, full_layer_every=config.integer(INTERVAL, 1, MAX.layers))
    drafts = has(f"{DRAFT}fc.weight") and not any(map(has, OF_ITS_OWN))
    recurrent = {
        "state_heads": config.integer("linear_num_value_heads", 1, MAX.query_heads),
        "state_key_heads": config.integer("linear_num_key_heads", 1, MAX.query_heads),
        "state_key_width": config.integer("linear_key_head_dim", 1, MAX.head_width),
        "state_value_width": config.integer("linear_value_head_dim", 1, MAX.head_width),
        "convolution_tokens": config.integer("linear_conv_kernel_dim", 1, MAX_CONVOLUTION),
    }
    mixers += ["attention"] * drafts
    return gated_model(
        config,
        choices,
        family=NAME,
        activation=gated_activation(config, has, choices.activation),
        windows=[0] * len(mixers),
        qkv_bias=False,
        head_norm=True,
        mixers=mixers,
        dense_experts=None if of_dense is None else [*of_dense, *[0] * drafts],
        further={"gated_attention": True, "draft_layers": int(drafts), **(recurrent if "deltanet" in mixers else {})},
        **mixture,
    )


def _architecture(config_class: str, defaults: dict[str, Any], read: Any, names: TensorNames, part: str | None) -> Any:
    return Architecture(
        config_class=config_class,
        defaults=defaults,
        read=read,
        names=names,
        harmless=LEFT_OUT,
        norm_offset=1.0,
        partial_rotary=True,
        part=part,
        renamed_tensors={r"^model\.mtp\.": "mtp.", r"^mtp\.(fc|norm|pre_fc_norm_\w+)\.": DRAFT + r"\1."},
    )


_QWEN35 = ("Qwen3_5TextConfig", QWEN35_DEFAULTS, _qwen35, QWEN35_NAMES)
_GGUF = GgufArchitecture(
    interleaved=False,
    partial_rotary=True,
    ffn_norm="post_attention_norm",
    gated_attention=True,
    recurrent="deltanet",
    drafts=True,
)
_QWEN35_MOE = ("Qwen3_5MoeTextConfig", QWEN35_MOE_DEFAULTS, _qwen35_moe, QWEN35_MOE_NAMES)
FAMILY = Family(
    name=NAME,
    architectures={
        "Qwen3NextForCausalLM": _architecture("Qwen3NextConfig", DEFAULTS, _next, OWN_NAMES, None),
        "Qwen3_5ForCausalLM": _architecture(*_QWEN35, None),
        "Qwen3_5ForConditionalGeneration": _architecture(*_QWEN35, "text_config"),
        "Qwen3_5MoeForCausalLM": _architecture(*_QWEN35_MOE, None),
        "Qwen3_5MoeForConditionalGeneration": _architecture(*_QWEN35_MOE, "text_config"),
    },
    gguf={"qwen3next": _GGUF, **dict.fromkeys(("qwen35", "qwen35moe"), replace(_GGUF, tiled_heads=True))},
)
