"""Ling and Ring, by the class names of their repositories "Bailing": mixtures with queries, keys and values in one
tensor. The second generation has DeepSeek-V3's routers, norms of heads, and rotates a part of each head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from neuronpipe.plans.models.configuration import EXPERT_NAMES, GATED_DEFAULTS, gated_activation, gated_model
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture
from neuronpipe.plans.models.mixture_configuration import Mixture, dense_experts, first_layers
from neuronpipe.plans.models.spec import MAX, MAX_SCALE, MIN_SCALE, ModelSpec
from neuronpipe.plans.strict_json import Record

NAME = "bailing"
Has = Callable[[str], bool]

# BailingMoeConfig in inclusionAI/Ling-lite. Sizes have no defaults here: files without them are not of these models.
DEFAULTS = {
    **{name: value for name, value in GATED_DEFAULTS.items() if not name.startswith(("hidden_size", "num_"))},
    "num_key_value_heads": None,  # as many as heads
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16384,
    "use_qkv_bias": False,
    "use_bias": True,
    "norm_head": False,
    "use_sliding_window": False,
    "num_shared_experts": 0,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "first_k_dense_replace": 0,
    "eos_token_id": None,
}
# BailingMoeV2Config in inclusionAI/Ling-mini-2.0.
V2_DEFAULTS = {
    **DEFAULTS,
    "use_qk_norm": False,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "num_nextn_predict_layers": 0,
}
BIAS = "mlp.gate.expert_bias"
NAMES = replace(
    EXPERT_NAMES,
    embedding="model.word_embeddings",
    query_key_value="attention.query_key_value",
    query=None,
    key=None,
    value=None,
    query_norm="attention.query_layernorm",
    key_norm="attention.key_layernorm",
    attention_output="attention.dense",
    choosing_bias=BIAS,
    shared="mlp.shared_experts.{}_proj",
)


def _first(config: Record, has: Has, choices: Choices) -> ModelSpec:
    return _model(config, has, choices, _mixture(config), head_norm=False)


def _second(config: Record, has: Has, choices: Choices) -> ModelSpec:
    if config.text("score_function") != "sigmoid":
        config.fail("score_function", "only sigmoid is supported in this class")
    mixture = _mixture(config)
    groups = max(config.integer("n_group", 0, mixture.experts), 1)  # 0: none, like 1
    if mixture.experts % groups:
        config.fail("n_group", f"{groups} groups of {mixture.experts} experts")
    dense = first_layers(config).index(False)
    mixture = mixture._replace(
        router="sigmoid",
        choosing_bias=has(f"model.layers.{dense}.{BIAS}"),
        normalized_shares=mixture.experts_per_token > 1,  # the class does not read norm_topk_prob
        router_groups=groups,
        groups_per_token=config.integer("topk_group", 1, groups) if groups > 1 else 1,
        routed_scale=config.number("routed_scaling_factor", MIN_SCALE, MAX_SCALE),
    )
    return _model(config, has, choices, mixture, head_norm=config.boolean("use_qk_norm"))


def _mixture(config: Record) -> Mixture:
    experts = config.integer("num_experts", 2, MAX.experts)
    chosen = config.integer("num_experts_per_tok", 1, experts)
    shared = config.integer("num_shared_experts", 0, MAX.experts) if config.has("num_shared_experts") else 0
    normalized = config.boolean("norm_topk_prob") and chosen > 1
    return Mixture(experts, chosen, shared_experts=shared, normalized_shares=normalized)


def _model(config: Record, has: Has, choices: Choices, mixture: Mixture, *, head_norm: bool) -> ModelSpec:
    for field in ("use_bias", "norm_head", "use_sliding_window"):
        if config.boolean(field):
            config.fail(field, "is true: not supported in this class")
    return gated_model(
        config,
        choices,
        family=NAME,
        activation=gated_activation(config, has, choices.activation),
        windows=[0] * config.integer("num_hidden_layers", 1, MAX.layers),
        qkv_bias=config.boolean("use_qkv_bias"),
        head_norm=head_norm,
        neurons="moe_intermediate_size",
        mixture=mixture,
        dense_experts=dense_experts(config, first_layers(config), "intermediate_size", "moe_intermediate_size"),
    )


FAMILY = Family(
    name=NAME,
    architectures={
        "BailingMoeForCausalLM": Architecture(
            config_class="BailingMoeConfig", defaults=DEFAULTS, read=_first, names=NAMES
        ),
        "BailingMoeV2ForCausalLM": Architecture(
            config_class="BailingMoeV2Config",
            defaults=V2_DEFAULTS,
            read=_second,
            names=NAMES,
            partial_rotary=True,
            extra_layers="num_nextn_predict_layers",
        ),
    },
    gguf={
        "bailingmoe": GgufArchitecture(interleaved=True),
        "bailingmoe2": GgufArchitecture(interleaved=False, router="sigmoid", partial_rotary=True),
    },
)
