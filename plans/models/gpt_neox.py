"""GPT-NeoX and StarCoder2: LayerNorm, biases everywhere, a feed-forward of Up and Down with GELU between them.

GPT-NeoX and Pythia have attention and feed-forward in parallel, after one norm each, rotary positions on a part of each
head, and the exact GELU. Their queries, keys and values lie in one tensor, those of a head together. StarCoder2 has
attention windows and the GELU of a hyperbolic tangent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from neuronpipe.plans.models.configuration import GATED_NAMES, build_spec, sizes, sliding_windows
from neuronpipe.plans.models.falcon import grouped_rows
from neuronpipe.plans.models.family import (
    ACTIVATION_NAMES,
    Architecture,
    Choices,
    Family,
    GgufArchitecture,
    TensorNames,
    named_activation,
)
from neuronpipe.plans.models.spec import MAX, Activation, ModelSpec, runs_of
from neuronpipe.plans.strict_json import Record

NAME = "gpt_neox"
Has = Callable[[str], bool]

# GPTNeoXConfig in transformers/models/gpt_neox/configuration_gpt_neox.py.
NEOX_DEFAULTS = {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "attention_bias": True,
    "rope_theta": 10_000.0,
    "rope_parameters": None,
    "partial_rotary_factor": 0.25,
    "eos_token_id": 2,
}
# Starcoder2Config in transformers/models/starcoder2/configuration_starcoder2.py.
STARCODER2_DEFAULTS = {
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "head_dim": None,  # hidden_size / num_attention_heads
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "sliding_window": None,
    "use_bias": True,
    "tie_word_embeddings": True,
    "rope_theta": 10_000.0,
    "rope_parameters": None,
    "eos_token_id": 50256,
}
ACTIVATIONS: dict[str, Activation] = {
    **ACTIVATION_NAMES,
    "gelu": "gelu_erf",
    **dict.fromkeys(("gelu_new", "gelu_fast"), "gelu"),
}
NEOX_NAMES = TensorNames(
    embedding="gpt_neox.embed_in",
    output="embed_out",
    output_norm="gpt_neox.final_layer_norm",
    layer="gpt_neox.layers.{}.",
    attention_norm="input_layernorm",
    ffn_norm="post_attention_layernorm",
    query_key_value="attention.query_key_value",
    attention_output="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)
STARCODER2_NAMES = replace(
    GATED_NAMES, gate=None, query_norm=None, key_norm=None, up="mlp.c_fc", down="mlp.c_proj", predictor=None
)


def _neox(config: Record, _: Has, choices: Choices) -> ModelSpec:
    bias, layers = config.boolean("attention_bias"), config.integer("num_hidden_layers", 1, MAX.layers)
    return _model(
        config,
        choices,
        [0] * layers,
        norm_epsilon=config.number("layer_norm_eps", 0.0, 1.0),
        qkv_bias=bias,
        output_bias=bias,
        ffn_bias=True,
        parallel=config.boolean("use_parallel_residual"),
    )


def _starcoder2(config: Record, _: Has, choices: Choices) -> ModelSpec:
    bias = config.boolean("use_bias")
    return _model(
        config,
        choices,
        sliding_windows(config, reads_layer_types=False),
        norm_epsilon=config.number("norm_epsilon", 0.0, 1.0),
        qkv_bias=bias,
        output_bias=bias,
        ffn_bias=bias,
    )


def _model(config: Record, choices: Choices, windows: list[int], **fields: float | bool) -> ModelSpec:
    stated = named_activation(config, "hidden_act", relu_may_mean_drelu=False, names=ACTIVATIONS)
    return build_spec(
        config,
        **sizes(config, choices),
        **fields,
        family=NAME,
        layer_kinds=runs_of(windows),
        norm="layer",
        activation=choices.activation or stated,
        gated=False,
    )


GGUF = GgufArchitecture(interleaved=False, norm="layer", gated=False)
FAMILY = Family(
    name=NAME,
    architectures={
        "GPTNeoXForCausalLM": Architecture(
            config_class="GPTNeoXConfig",
            defaults=NEOX_DEFAULTS,
            read=_neox,
            names=NEOX_NAMES,
            joined_rows=grouped_rows,
            harmless=r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
            partial_rotary=True,
            renamed={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
        ),
        "Starcoder2ForCausalLM": Architecture(
            config_class="Starcoder2Config", defaults=STARCODER2_DEFAULTS, read=_starcoder2, names=STARCODER2_NAMES
        ),
    },
    # No file states which GELU it is: llama.cpp computes that of a hyperbolic tangent for both.
    gguf={
        "gptneox": replace(GGUF, partial_rotary=True, parallel="stated", activation="gelu_erf"),
        "starcoder2": replace(GGUF, activation="gelu"),
    },
)
