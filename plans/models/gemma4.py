"""Gemma 4: Gemma 3 with wider heads in layers without windows, norms of values, and a feed-forward beside experts.

The text models without per-layer embeddings: the dense one (31B) and the mixture (26B-A4B). Layers without windows have
a head width and a number of key heads of their own, rotate a part of each head, and take values from the products of
keys. Scores are not divided by the root of a head's width. The stored weights of norms have their 1.

In the mixture a feed-forward computes every token besides the experts. It is cut into shared experts as wide as an
expert. Chosen and shared experts have norms of their own, and so has the router.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from neuronpipe.plans.models.configuration import FULL, SLIDING, build_spec, refuse_biases, sizes, sliding_windows
from neuronpipe.plans.models.family import (
    Architecture,
    Choices,
    Family,
    GgufArchitecture,
    TensorNames,
    named_activation,
)
from neuronpipe.plans.models.gemma import GEMMA3_NAMES, LOCAL_THETA, OTHER_TOWERS
from neuronpipe.plans.models.mixture_configuration import Mixture
from neuronpipe.plans.models.spec import MAX, MAX_THRESHOLD, MIN_SCALE, LayerKind, ModelSpec, joined_runs
from neuronpipe.plans.strict_json import Record

NAME = "gemma4"
FULL_LAYER_EVERY = 6
Has = Callable[[str], bool]

# Gemma4TextConfig in transformers/models/gemma4/configuration_gemma4.py; its __post_init__ sets rope_parameters and
# global_head_dim. It writes per_layer_config instead of the global fields of published files.
DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "per_layer_config": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": LOCAL_THETA,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": LOCAL_THETA},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
    "attention_bias": False,
    "attention_k_eq_v": False,
    "sliding_window": 512,
    "layer_types": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": None,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
    "eos_token_id": 1,
}
NAMES = replace(GEMMA3_NAMES, scale="layer_scalar")
EXPERT_NAMES = replace(
    NAMES,
    routed_norm="pre_feedforward_layernorm_2",
    routed_output_norm="post_feedforward_layernorm_2",
    shared_output_norm="post_feedforward_layernorm_1",
    router="router.proj",
    router_norm="router.scale",
    expert_scales="router.per_expert_scale",
    fused_experts=("experts.gate_up_proj", "experts.down_proj"),
    shared="mlp.{}_proj",
)


def _names(config: Record) -> TensorNames:
    return EXPERT_NAMES if config.boolean("enable_moe_block") else NAMES


def _refuse_unsupported(config: Record, has: Has) -> None:
    refuse_biases(config, has)
    if config.has("attention_bias") and config.boolean("attention_bias"):
        config.fail("attention_bias", "is true: not supported in this class")
    for field, what in (
        ("hidden_size_per_layer_input", "embeddings of each layer"),
        ("num_kv_shared_layers", "layers that share keys and values"),
    ):
        if config.has(field) and (number := config.integer(field, 0, MAX.width)):
            config.fail(field, f"is {number}: {what}, as E2B and E4B have them, are not supported")
    if config.has("use_bidirectional_attention") and config.text("use_bidirectional_attention") != "vision":
        config.fail("use_bidirectional_attention", "concerns all tokens: not supported")
    if not config.has("rope_parameters"):
        config.fail("rope_parameters", f"is null; expected {FULL} and {SLIDING}")


def _layers(config: Record) -> list[LayerKind]:
    """Return each layer. The last one never has a window."""
    config.integer("sliding_window", 1, MAX.context_tokens)
    windows = sliding_windows(config, full_layer_every=FULL_LAYER_EVERY, reads_layer_types=True)
    windows[-1] = 0
    joint = config.boolean("attention_k_eq_v")
    kinds = [
        LayerKind(1, window, local_positions=window > 0, value_from_key=joint and window == 0) for window in windows
    ]
    if config.has("per_layer_config"):
        return _layers_by_number(config.record("per_layer_config"), kinds)
    width = config.integer("global_head_dim", 2, MAX.head_width)
    field = "num_global_key_value_heads"
    key_heads = config.integer(field, 1, MAX.key_heads) if joint and config.has(field) else 0
    return [kind if kind.local_positions else replace(kind, head_width=width, key_heads=key_heads) for kind in kinds]


def _layers_by_number(overrides: Record, kinds: list[LayerKind]) -> list[LayerKind]:
    """Return the layers with the heads that `per_layer_config` states. Raises UserError if it states anything else."""
    width, key_heads = "head_dim", "num_key_value_heads"
    for name in overrides.names():
        if not name.isdecimal() or int(name) >= len(kinds):  # transformers pads numbers with zeros
            overrides.fail(name, f"is no layer of {len(kinds)}")
        layer = overrides.record(name)
        for key in layer.names():
            if key not in (width, key_heads):
                layer.fail(key, "may not differ between layers: not supported")
        kinds[int(name)] = replace(
            kinds[int(name)],
            head_width=layer.integer(width, 2, MAX.head_width) if layer.has(width) else 0,
            key_heads=layer.integer(key_heads, 1, MAX.key_heads) if layer.has(key_heads) else 0,
        )
    return kinds


def _mixture(config: Record) -> Mixture:
    experts = config.integer("num_experts", 2, MAX.experts)
    wide, of_expert = (config.integer(key, 1, MAX.neurons) for key in ("intermediate_size", "moe_intermediate_size"))
    return Mixture(
        experts, config.integer("top_k_experts", 1, experts), shared_experts=-(-wide // of_expert), router_norm=True,
        expert_scales=True, branch_norms=True,
    )  # fmt: skip


def _model(config: Record, has: Has, choices: Choices) -> ModelSpec:
    _refuse_unsupported(config, has)
    is_mixture = config.boolean("enable_moe_block")
    of_sizes = sizes(config, choices, "moe_intermediate_size" if is_mixture else "intermediate_size")
    layers = [
        replace(
            kind,
            head_width=kind.head_width if kind.head_width != of_sizes["head_width"] else 0,
            key_heads=kind.key_heads if kind.key_heads != of_sizes["key_heads"] else 0,
        )
        for kind in _layers(config)
    ]
    local = [kind for kind in layers if kind.local_positions]
    width_of = {is_local: _head_width(layers, is_local, of_sizes["head_width"]) for is_local in (True, False)}
    cap = "final_logit_softcapping"
    return build_spec(
        config,
        **of_sizes,
        **(_mixture(config)._asdict() if is_mixture else {}),
        family=NAME,
        layer_kinds=joined_runs(layers),
        norm_epsilon=config.number("rms_norm_eps", 0.0, 1.0),
        norms="both",
        head_norm=True,
        value_norm=True,
        layer_scales=True,
        activation=choices.activation or named_activation(config, "hidden_activation", relu_may_mean_drelu=False),
        # transformers rounds the factor to the type of the weights; in float32, with which ours agrees, it is exact.
        embedding_scale=math.sqrt(of_sizes["width"]),
        attention_scale=math.sqrt(width_of[False]),
        local_attention_scale=math.sqrt(width_of[True]) if local else 1.0,
        logit_cap=config.number(cap, MIN_SCALE, MAX_THRESHOLD) if config.has(cap) else 0.0,
    )


def _head_width(layers: list[LayerKind], is_local: bool, usual: int) -> int:
    """Return the width of the heads of layers with local positions, or of the others."""
    return next((kind.head_width for kind in layers if kind.local_positions == is_local and kind.head_width), usual)


FAMILY = Family(
    name=NAME,
    architectures={
        "Gemma4ForCausalLM": Architecture(
            config_class="Gemma4TextConfig", defaults=DEFAULTS, read=_model, names=_names, local_theta=LOCAL_THETA
        ),
        "Gemma4ForConditionalGeneration": Architecture(
            config_class="Gemma4TextConfig",
            defaults=DEFAULTS,
            read=_model,
            names=_names,
            harmless=OTHER_TOWERS,
            local_theta=LOCAL_THETA,
            part="text_config",
        ),
    },
    gguf={
        "gemma4": GgufArchitecture(
            interleaved=False,
            activation="gelu",
            norms="both",
            scales_embedding=True,
            local_theta=LOCAL_THETA,
            gemma4_layers=True,
        ),
    },
)
