"""DeepSeek-V2 and -V3, Moonlight, GLM-4.7-Flash: multi-head latent attention and mixtures with shared experts.

Keys and values of all heads are computed from one narrow vector of a position, its latent; the rotated part of keys is
the same in all heads. Norms of latents have an epsilon of 1e-6 whatever `rms_norm_eps` says. DeepSeek-V2's routers are
softmaxes whose groups are ranked by their best expert, the others' are as in glm4_moe.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from neuronpipe.plans.models.configuration import (
    GATED_DEFAULTS,
    GATED_HARMLESS,
    build_spec,
    context_tokens,
    gated_activation,
    require_integer,
    require_text,
    threshold,
)
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture, TensorNames
from neuronpipe.plans.models.glm4_moe import NAMES as GLM_NAMES
from neuronpipe.plans.models.mixture_configuration import (
    DEEPSEEK_DEFAULTS,
    Mixture,
    deepseek_mixture,
    dense_experts,
    first_layers,
    listed_layers,
)
from neuronpipe.plans.models.spec import MAX, MAX_SCALE, MIN_SCALE, ModelSpec, runs_of
from neuronpipe.plans.strict_json import Record

NAME = "deepseek"
MTP_LAYERS = "num_nextn_predict_layers"
Has = Callable[[str], bool]

_DEFAULTS = {
    **GATED_DEFAULTS,
    **DEEPSEEK_DEFAULTS,
    "attention_bias": False,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
# DeepseekV2Config in transformers/models/deepseek_v2/configuration_deepseek_v2.py.
V2_DEFAULTS = {
    **_DEFAULTS,
    "vocab_size": 102400,
    "intermediate_size": 11008,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "q_lora_rank": 1536,
    "n_group": None,
    "topk_group": None,
    "topk_method": "greedy",
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": None,
    "moe_intermediate_size": 1407,
    "eos_token_id": 2,
}
# DeepseekV3Config in transformers/models/deepseek_v3/configuration_deepseek_v3.py.
V3_DEFAULTS = {
    **_DEFAULTS,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rope_interleave": True,
    MTP_LAYERS: 1,
    "eos_token_id": 1,
}
# Glm4MoeLiteConfig in transformers/models/glm4_moe_lite/configuration_glm4_moe_lite.py.
GLM_DEFAULTS = {
    **{key: value for key, value in V3_DEFAULTS.items() if key not in ("first_k_dense_replace", MTP_LAYERS)},
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.8,
    "q_lora_rank": 768,
    "v_head_dim": 256,
    "qk_nope_head_dim": 192,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "mlp_layer_types": None,
}
_NAMES = replace(
    GLM_NAMES,
    query="self_attn.q_proj",
    query_norm=None,
    key_norm=None,
    latent_down="self_attn.kv_a_proj_with_mqa",
    latent_norm="self_attn.kv_a_layernorm",
    latent_up="self_attn.kv_b_proj",
    query_down="self_attn.q_a_proj",
    query_down_norm="self_attn.q_a_layernorm",
)


def names(config: Record) -> TensorNames:
    """Return the names of tensors, which depend on whether queries have a latent."""
    if config.has("q_lora_rank"):
        return replace(_NAMES, query="self_attn.q_b_proj")
    return replace(_NAMES, query_down=None, query_down_norm=None)


SOFTMAX_METHODS = ("greedy", "group_limited_greedy")
"""How DeepSeek-V2's routers choose, `topk_method`: among all experts, or within the best groups."""


def _v2(config: Record, has: Has, choices: Choices) -> ModelSpec:
    if config.boolean("mlp_bias"):
        config.fail("mlp_bias", "biases in the feed-forward are not supported")
    require_text(config, "scoring_func", "softmax")
    return _model(config, has, choices, mixture=_v2_mixture(config), dense=first_layers(config))


def _v3(config: Record, has: Has, choices: Choices) -> ModelSpec:
    require_text(config, "scoring_func", "sigmoid")
    require_text(config, "topk_method", "noaux_tc")
    return _model(config, has, choices, mixture=deepseek_mixture(config), dense=first_layers(config))


def _glm(config: Record, has: Has, choices: Choices) -> ModelSpec:
    layers = config.integer("num_hidden_layers", 1, MAX.layers)
    dense = listed_layers(config, [layer == 0 for layer in range(layers)])
    return _model(config, has, choices, mixture=deepseek_mixture(config), dense=dense)


def _v2_mixture(config: Record) -> Mixture:
    experts = config.integer("n_routed_experts", 2, MAX.experts)
    method = config.choice("topk_method", *SOFTMAX_METHODS)
    if config.boolean("norm_topk_prob"):
        config.fail("norm_topk_prob", "is true, which DeepSeek's code obeys and transformers ignores: not supported")
    groups = config.integer("n_group", 1, experts) if method == SOFTMAX_METHODS[1] else 1
    return Mixture(
        experts,
        config.integer("num_experts_per_tok", 1, experts),
        shared_experts=config.integer("n_shared_experts", 0, MAX.experts),
        normalized_shares=False,
        router_groups=groups,
        groups_per_token=config.integer("topk_group", 1, groups) if groups > 1 else 1,
        groups_by_best=groups > 1,
        routed_scale=config.number("routed_scaling_factor", MIN_SCALE, MAX_SCALE),
    )


def _model(config: Record, has: Has, choices: Choices, *, mixture: Mixture, dense: list[bool]) -> ModelSpec:
    """Return a model with latents. dense: for each layer, True if it has no router."""
    if config.boolean("attention_bias"):
        config.fail("attention_bias", "biases of attention are not supported in this class")
    return build_spec(
        config,
        **mixture._asdict(),
        **_attention(config),
        family=NAME,
        width=config.integer("hidden_size", 1, MAX.width),
        neurons=config.integer("moe_intermediate_size", 1, MAX.neurons),
        layer_kinds=runs_of(
            [0] * len(dense),
            dense_experts=dense_experts(config, dense, "intermediate_size", "moe_intermediate_size"),
        ),
        vocabulary=config.integer("vocab_size", 1, MAX.vocabulary),
        context_tokens=context_tokens(config, choices.context_tokens),
        norm_epsilon=config.number("rms_norm_eps", 0.0, 1.0),
        activation=gated_activation(config, has, choices.activation),
        activation_threshold=threshold(config, choices),
        tied_embeddings=config.boolean("tie_word_embeddings"),
    )


def _attention(config: Record) -> dict[str, Any]:
    fields = latent_attention(config)
    require_integer(config, "head_dim", fields["rotary_width"])
    return fields


def latent_attention(config: Record) -> dict[str, Any]:
    """Return the fields of ModelSpec that describe attention with latents."""
    heads = config.integer("num_attention_heads", 1, MAX.query_heads)
    rotated = config.integer("qk_rope_head_dim", 2, MAX.head_width)
    for key, expected in (("num_key_value_heads", heads), ("moe_layer_freq", 1)):
        require_integer(config, key, expected)
    return {
        "query_heads": heads,
        "key_heads": 1,
        "head_width": config.integer("qk_nope_head_dim", 1, MAX.head_width) + rotated,
        "latent_width": config.integer("kv_lora_rank", 1, MAX.width),
        "rotary_width": rotated,
        "value_width": config.integer("v_head_dim", 1, MAX.head_width),
        "query_rank": config.integer("q_lora_rank", 1, MAX.width) if config.has("q_lora_rank") else 0,
    }


def _architecture(config_class: str, defaults: dict[str, Any], read: Any, **more: Any) -> Architecture:
    return Architecture(
        config_class=config_class, defaults=defaults, read=read, names=names, harmless=GATED_HARMLESS, **more
    )


def _rotates_neighbours(config: Record) -> bool:
    return config.boolean("rope_interleave")


FAMILY = Family(
    name=NAME,
    architectures={
        "DeepseekV2ForCausalLM": _architecture("DeepseekV2Config", V2_DEFAULTS, _v2, interleaved=True),
        "DeepseekV3ForCausalLM": _architecture(
            "DeepseekV3Config",
            V3_DEFAULTS,
            _v3,
            interleaved=_rotates_neighbours,
            extra_layers=MTP_LAYERS,
        ),
        "Glm4MoeLiteForCausalLM": _architecture(
            "Glm4MoeLiteConfig",
            GLM_DEFAULTS,
            _glm,
            interleaved=_rotates_neighbours,
            extra_layers=MTP_LAYERS,
        ),
    },
    gguf={"deepseek2": GgufArchitecture(interleaved=True, latents=True, normalized_shares=False)},
)
