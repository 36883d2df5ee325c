"""SmallThinker: experts with ReLU gates. The router reads the layer's input before it is normed, so the chosen experts
are known before attention. Some layers have neither rotary positions nor a window.

Keys and defaults: configuration_smallthinker.py in the models' own repositories (PowerInfer/SmallThinker-4BA0.6B,
-21BA3B). Its class has no other activation than relu(gate) * up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from neuronpipe.plans.models.configuration import GATED_DEFAULTS, GATED_NAMES, gated_model
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture
from neuronpipe.plans.models.mixture_configuration import Mixture
from neuronpipe.plans.models.spec import MAX, ModelSpec, Router
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import quoted

NAME = "smallthinker"

DEFAULTS = {
    **GATED_DEFAULTS,
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 4096 * 32,
    "rope_theta": 1_000_000.0,
    "rope_layout": None,
    "sliding_window_layout": None,
    "sliding_window_size": 4096,
    "moe_layer_layout": None,
    "moe_num_primary_experts": 32,
    "moe_num_active_primary_experts": 4,
    "moe_ffn_hidden_size": 768,
    "moe_primary_router_apply_softmax": False,
    "moe_enable_early_router": True,
    "moe_enable_secondary_experts": False,
    "use_qk_norm": False,
    "tie_word_embeddings": True,
    "eos_token_id": [151643, 151645],
}
NAMES = replace(
    GATED_NAMES,
    router="block_sparse_moe.primary_router",
    expert="block_sparse_moe.experts.{}.",
    gate="gate",
    up="up",
    down="down",
    query_norm=None,
    key_norm=None,
)


def _read(config: Record, has: Callable[[str], bool], choices: Choices) -> ModelSpec:
    if not config.boolean("moe_enable_early_router"):
        config.fail("moe_enable_early_router", "is false: a router that reads elsewhere is not supported")
    for field in ("moe_enable_secondary_experts", "use_qk_norm"):
        if config.boolean(field):
            config.fail(field, "is true: not supported")
    if 0 in _layout(config, "moe_layer_layout", 1):
        config.fail("moe_layer_layout", "layers without experts are not supported")
    windowed = _layout(config, "sliding_window_layout", 0)
    window_tokens = config.integer("sliding_window_size", 1, MAX.context_tokens) if 1 in windowed else 0
    experts = config.integer("moe_num_primary_experts", 2, MAX.experts)
    router: Router = "softmax" if config.boolean("moe_primary_router_apply_softmax") else "sigmoid"
    return gated_model(
        config,
        choices,
        family=NAME,
        activation=choices.activation or "relu",
        windows=[window_tokens if flag else 0 for flag in windowed],
        rotary=[bool(flag) for flag in _layout(config, "rope_layout", 1)],
        qkv_bias=False,
        neurons="moe_ffn_hidden_size",
        mixture=Mixture(experts, config.integer("moe_num_active_primary_experts", 1, experts), router, "layer"),
    )


def _layout(config: Record, field: str, default: int) -> list[int]:
    """Return a field's flag, 0 or 1, for each layer; `default` if the field is missing. Raises UserError for other
    values."""
    layers = config.integer("num_hidden_layers", 1, MAX.layers)
    if not config.has(field):
        return [default] * layers
    flags = config.items(field)
    if len(flags) != layers or not all(type(flag) is int and flag in (0, 1) for flag in flags):
        config.fail(field, f"{quoted(flags)} is not 0 or 1 for each of {layers} layers")
    return flags


# GGUF files of SmallThinker's own engine name the router only if it is softmax, and may have a predictor for the output
# matrix. Files of llama.cpp name either router.
GGUF = GgufArchitecture(
    interleaved=False,
    activation="relu",
    router="sigmoid",
    router_reads="layer",
    harmless=r"lm_head_profiler\.weight",
)

FAMILY = Family(
    name=NAME,
    architectures={
        "SmallThinkerForCausalLM": Architecture(
            config_class="SmallThinkerConfig", defaults=DEFAULTS, read=_read, names=NAMES
        )
    },
    gguf={"smallthinker": GGUF},
)
