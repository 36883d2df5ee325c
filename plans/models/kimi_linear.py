"""Kimi-Linear: three of four layers are Kimi delta attention, the others attention with latents whose heads nothing
rotates. Feed-forwards are DeepSeek-V3's mixtures.

Published files and transformers call most keys otherwise than DeepSeek's do, and list the kinds of layers in different
ways: the former number them from 1 within `linear_attn_config`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from neuronpipe.plans.models.configuration import (
    FULL,
    GATED_HARMLESS,
    build_spec,
    context_tokens,
    gated_activation,
    layer_mixers,
    require_text,
)
from neuronpipe.plans.models.deepseek import latent_attention
from neuronpipe.plans.models.deepseek import names as deepseek_names
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture, TensorNames
from neuronpipe.plans.models.mixture_configuration import Mixture, dense_experts, first_layers, listed_layers
from neuronpipe.plans.models.recurrent_sizes import Mixer
from neuronpipe.plans.models.recurrent_tensors import kda_tensors
from neuronpipe.plans.models.spec import MAX, MAX_CONVOLUTION, MAX_SCALE, MIN_SCALE, ModelSpec, runs_of
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import quoted

NAME = "kimi_linear"
MIXERS: dict[str, Mixer] = {"linear_attention": "kda", FULL: "attention"}
FULL_LAYER_EVERY = 4
MTP_LAYERS = "num_nextn_predict_layers"
LINEAR = "linear_attn_config"
Has = Callable[[str], bool]

# KimiLinearConfig in transformers/models/kimi_linear/configuration_kimi_linear.py.
DEFAULTS = {
    "vocab_size": 163_840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.446,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "num_expert_group": 1,
    "topk_group": 1,
    "num_experts_per_token": 8,
    "moe_renormalize": True,
    "hidden_act": "silu",
    "model_max_length": 1 << 20,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "num_experts": 256,
    "mlp_layer_types": None,
    "layer_types": None,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
    "eos_token_id": 163_586,
}
# Keys of other classes that transformers takes, too.
RENAMED = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}


def _names(config: Record) -> TensorNames:
    return replace(
        deepseek_names(config),
        router="block_sparse_moe.gate",
        choosing_bias="block_sparse_moe.gate.e_score_correction_bias",
        expert="block_sparse_moe.experts.{}.",
        gate="w1",
        up="w3",
        down="w2",
        shared="block_sparse_moe.shared_experts.{}_proj",
        recurrent=lambda model, layer: kda_tensors(model, "self_attn"),
    )


def _read(config: Record, has: Has, choices: Choices) -> ModelSpec:
    _refuse(config)
    layers = config.integer("num_hidden_layers", 1, MAX.layers)
    first = config if config.has("first_k_dense_replace") else config.over({"first_k_dense_replace": 1}, "the class")
    dense = listed_layers(config, first_layers(first))
    mixers = _mixers(config, layers)
    return build_spec(
        config,
        **_mixture(config)._asdict(),
        **latent_attention(config),
        **(_memories(config) if "kda" in mixers else {}),
        family=NAME,
        width=config.integer("hidden_size", 1, MAX.width),
        neurons=config.integer("moe_intermediate_size", 1, MAX.neurons),
        layer_kinds=runs_of(
            [0] * layers,
            [mixer != "attention" for mixer in mixers],
            dense_experts(config, dense, "intermediate_size", "moe_intermediate_size"),
            mixers=mixers,
        ),
        vocabulary=config.integer("vocab_size", 1, MAX.vocabulary),
        context_tokens=context_tokens(config, choices.context_tokens, "model_max_length"),
        norm_epsilon=config.number("rms_norm_eps", 0.0, 1.0),
        activation=gated_activation(config, has, choices.activation),
        # The class never ties its output to the embedding.
        tied_embeddings=config.boolean("tie_word_embeddings") and not has("lm_head.weight"),
    )


def _refuse(config: Record) -> None:
    """Raise UserError for settings that are not computed."""
    config.choice("hidden_act", "silu")  # that of the convolutions, too
    if config.boolean("attention_bias"):
        config.fail("attention_bias", "biases of attention are not supported in this class")
    if config.has("mla_use_nope") and not config.boolean("mla_use_nope"):
        config.fail("mla_use_nope", "is false: heads are not rotated in this class")
    if config.has("rope_scaling"):
        config.fail("rope_scaling", "heads are not rotated in this class")
    require_text(config, "moe_router_activation_func", "sigmoid")
    groups = config.integer("num_expert_group", 1, MAX.experts)
    if groups > 1 and config.has("use_grouped_topk") and not config.boolean("use_grouped_topk"):
        config.fail("use_grouped_topk", f"is false, but there are {groups} groups of experts")
    for key in ("gate_lower_bound", "use_full_rank_gate"):
        if config.has(LINEAR) and (linear := config.record(LINEAR)).has(key) and linear.value(key) is not False:
            linear.fail(key, "is not supported in this class")


def _mixture(config: Record) -> Mixture:
    experts = config.integer("num_experts", 2, MAX.experts)
    groups = config.integer("num_expert_group", 1, experts)
    if experts % groups:
        config.fail("num_expert_group", f"{groups} groups of {experts} experts")
    return Mixture(
        experts,
        config.integer("num_experts_per_token", 1, experts),
        router="sigmoid",
        shared_experts=config.integer("num_shared_experts", 1, MAX.experts),
        choosing_bias=True,
        normalized_shares=config.boolean("moe_renormalize"),
        router_groups=groups,
        groups_per_token=config.integer("topk_group", 1, groups),
        routed_scale=config.number("routed_scaling_factor", MIN_SCALE, MAX_SCALE),
    )


def _memories(config: Record) -> dict[str, Any]:
    """Return the fields of ModelSpec that describe Kimi delta attention. All its vectors are as wide as a head."""

    def integer(published_key: str, key: str, maximum: int) -> int:
        if config.has(LINEAR) and config.record(LINEAR).has(published_key):
            return config.record(LINEAR).integer(published_key, 1, maximum)
        return config.integer(key, 1, maximum)

    heads = integer("num_heads", "linear_num_heads", MAX.query_heads)
    width = integer("head_dim", "linear_head_dim", MAX.head_width)
    return {
        "state_heads": heads,
        "state_key_heads": heads,
        "state_key_width": width,
        "state_value_width": width,
        "state_rank": width,
        "convolution_tokens": integer("short_conv_kernel_size", "linear_conv_kernel_dim", MAX_CONVOLUTION),
    }


def _mixers(config: Record, layers: int) -> list[Mixer]:
    """Return the mixer of each layer."""
    if config.has("layer_types"):
        return layer_mixers(config, MIXERS)
    linear = config.record(LINEAR) if config.has(LINEAR) else None
    if linear is None or not (linear.has("kda_layers") and linear.has("full_attn_layers")):
        return ["attention" if layer and layer % FULL_LAYER_EVERY == 0 else "kda" for layer in range(layers)]
    full, kda = linear.items("full_attn_layers"), linear.items("kda_layers")
    for key, listed in (("full_attn_layers", full), ("kda_layers", kda)):
        if not all(type(number) is int and 1 <= number <= layers for number in listed):
            linear.fail(key, f"{quoted(listed)} is no list of layers from 1 to {layers}")
    if sorted(full + kda) != list(range(1, layers + 1)):
        linear.fail("kda_layers", f"does not list each of {layers} layers that full_attn_layers leaves out, once")
    return ["attention" if layer + 1 in full else "kda" for layer in range(layers)]


FAMILY = Family(
    name=NAME,
    architectures={
        "KimiLinearForCausalLM": Architecture(
            config_class="KimiLinearConfig",
            defaults=DEFAULTS,
            read=_read,
            names=_names,
            harmless=GATED_HARMLESS,
            renamed=RENAMED,
            # transformers saves the feed-forwards of dense layers under the name of mixtures
            renamed_tensors={r"block_sparse_moe\.(gate|up|down)_proj": r"mlp.\1_proj"},
            extra_layers=MTP_LAYERS,
        )
    },
    gguf={"kimi-linear": GgufArchitecture(interleaved=False, latents=True, recurrent="kda", rotated=False)},
)
