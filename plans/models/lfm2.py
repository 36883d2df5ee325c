"""LFM2 and LFM2.5: most layers are a gated convolution over three tokens, the others attention.

The mixtures begin with dense layers, and have routers with sigmoids and a bias that only chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from neuronpipe.plans.models.configuration import FULL, gated_model, layer_mixers
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture, TensorNames
from neuronpipe.plans.models.mixture_configuration import Mixture, dense_experts, first_layers
from neuronpipe.plans.models.recurrent_sizes import Mixer
from neuronpipe.plans.models.recurrent_tensors import convolution_tensors
from neuronpipe.plans.models.spec import MAX, MAX_CONVOLUTION, MAX_SCALE, MIN_SCALE, ModelSpec
from neuronpipe.plans.strict_json import Record

NAME = "lfm2"
MIXERS: dict[str, Mixer] = {"conv": "convolution", FULL: "attention"}
Has = Callable[[str], bool]

# Lfm2Config in transformers/models/lfm2/configuration_lfm2.py. tie_embedding, block_ff_dim: older names. The class
# has no hidden_act, and published files do not state it: its feed-forward is SiLU.
DEFAULTS = {
    "hidden_act": "silu",
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "tie_embedding": None,
    "rope_theta": 1_000_000.0,
    "rope_parameters": None,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_ff_dim": None,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "full_attn_idxs": None,
    "layer_types": None,
    "eos_token_id": 2,
}
# Lfm2MoeConfig in transformers/models/lfm2_moe/configuration_lfm2_moe.py.
MOE_DEFAULTS = {
    **{name: value for name, value in DEFAULTS.items() if not name.startswith("block_") and name != "full_attn_idxs"},
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts_per_tok": 4,
    "num_experts": 32,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}
NAMES = TensorNames(
    embedding="model.embed_tokens",
    output="lm_head",
    output_norm="model.embedding_norm",
    layer="model.layers.{}.",
    attention_norm="operator_norm",
    ffn_norm="ffn_norm",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    attention_output="self_attn.out_proj",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    recurrent=lambda model, layer: convolution_tensors(model, "conv"),
)
MOE_NAMES = replace(
    NAMES,
    router="feed_forward.gate",
    expert="feed_forward.experts.{}.",
    gate="w1",
    up="w3",
    down="w2",
    dense={"gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2"},
    choosing_bias="feed_forward.expert_bias",
)


def _neurons(config: Record) -> int:
    """Return the number of neurons, which a configuration may state before it is reduced and rounded up."""
    older = "block_ff_dim"
    neurons = config.integer(older if config.has(older) else "intermediate_size", 1, MAX.neurons)
    if not config.boolean("block_auto_adjust_ff_dim"):
        return neurons
    neurons = 2 * neurons // 3
    if config.has("block_ffn_dim_multiplier"):
        multiple = config.integer("block_multiple_of", 1, MAX.neurons)
        neurons = int(config.number("block_ffn_dim_multiplier", 1e-3, 1e3) * neurons)
        neurons = -(-neurons // multiple) * multiple
    return neurons


def _mixers(config: Record) -> list[Mixer]:
    if config.has("layer_types"):
        return layer_mixers(config, MIXERS)
    layers = config.integer("num_hidden_layers", 1, MAX.layers)
    full = config.items("full_attn_idxs") if config.has("full_attn_idxs") else list(range(layers))
    return ["attention" if layer in full else "convolution" for layer in range(layers)]


def _dense(config: Record, has: Has, choices: Choices) -> ModelSpec:
    model = _model(config, choices, _mixers(config), None, None)
    return replace(model, neurons=_neurons(config))


def _mixture(config: Record, has: Has, choices: Choices) -> ModelSpec:
    experts = config.integer("num_experts", 2, MAX.experts)
    mixture = Mixture(
        experts,
        config.integer("num_experts_per_tok", 1, experts),
        router="sigmoid",
        choosing_bias=config.boolean("use_expert_bias"),
        normalized_shares=config.boolean("norm_topk_prob"),
        routed_scale=config.number("routed_scaling_factor", MIN_SCALE, MAX_SCALE),
    )
    is_dense = first_layers(config, "num_dense_layers")
    of_dense = dense_experts(config, is_dense, "intermediate_size", "moe_intermediate_size")
    return _model(config, choices, layer_mixers(config, MIXERS), mixture, of_dense)


def _model(
    config: Record, choices: Choices, mixers: list[Mixer], mixture: Mixture | None, of_dense: list[int] | None
) -> ModelSpec:
    if config.boolean("conv_bias"):
        config.fail("conv_bias", "is true: not supported in this class")
    tied = "tie_embedding" if config.has("tie_embedding") else "tie_word_embeddings"
    further = {"convolution_tokens": config.integer("conv_L_cache", 1, MAX_CONVOLUTION)}
    model = gated_model(
        config,
        choices,
        family=NAME,
        activation=choices.activation or "silu",
        windows=[0] * len(mixers),
        qkv_bias=False,
        head_norm=True,
        neurons="intermediate_size" if mixture is None else "moe_intermediate_size",
        mixture=mixture,
        dense_experts=of_dense,
        mixers=mixers,
        epsilon="norm_eps",
        further=further if "convolution" in mixers else {},
    )
    return replace(model, tied_embeddings=config.boolean(tied))


FAMILY = Family(
    name=NAME,
    architectures={
        "Lfm2ForCausalLM": Architecture(config_class="Lfm2Config", defaults=DEFAULTS, read=_dense, names=NAMES),
        "Lfm2MoeForCausalLM": Architecture(
            config_class="Lfm2MoeConfig", defaults=MOE_DEFAULTS, read=_mixture, names=MOE_NAMES
        ),
    },
    gguf=dict.fromkeys(
        ("lfm2", "lfm2moe"), GgufArchitecture(interleaved=False, router="sigmoid", recurrent="convolution")
    ),
)
