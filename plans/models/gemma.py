"""Gemma 2 and 3: norms before and after attention and feed-forward, GELU, and embeddings times the root of their width.

Both have windows in most layers, and a factor of attention scores of their own. Gemma 2 caps scores and logits. Gemma 3
norms queries and keys, and rotates heads of layers with windows by another table. The stored weights of norms lack 1.
Published configurations of Gemma 3 with a vision tower lack most sizes, which are the defaults below.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from neuronpipe.plans.models.configuration import GATED_NAMES, build_spec, refuse_biases, sizes, sliding_windows
from neuronpipe.plans.models.family import (
    Architecture,
    Choices,
    Family,
    GgufArchitecture,
    named_activation,
)
from neuronpipe.plans.models.spec import MAX, MAX_SCALE, MAX_THRESHOLD, MIN_SCALE, ModelSpec, runs_of
from neuronpipe.plans.strict_json import Record

NAME = "gemma"
Has = Callable[[str], bool]

# Gemma2Config in transformers/models/gemma2/configuration_gemma2.py.
GEMMA2_DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 10_000.0,
    "rope_parameters": None,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "use_bidirectional_attention": None,
    "eos_token_id": 1,
}
LOCAL_THETA = 10_000.0
# Gemma3TextConfig in transformers/models/gemma3/configuration_gemma3.py.
GEMMA3_DEFAULTS = {
    **GEMMA2_DEFAULTS,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": LOCAL_THETA,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "use_bidirectional_attention": False,
}
GEMMA2_NAMES = replace(
    GATED_NAMES,
    attention_output_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    ffn_output_norm="post_feedforward_layernorm",
    query_norm=None,
    key_norm=None,
    predictor=None,
)
GEMMA3_NAMES = replace(GEMMA2_NAMES, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
OTHER_TOWERS = r"(model\.)?(vision_tower|multi_modal_projector|audio_tower|embed_vision|embed_audio)\..*"


def _gemma2(config: Record, has: Has, choices: Choices) -> ModelSpec:
    return _model(config, has, choices, windows=sliding_windows(config, full_layer_every=2, reads_layer_types=True))


def _gemma3(config: Record, has: Has, choices: Choices) -> ModelSpec:
    pattern = "sliding_window_pattern"
    every = config.integer(pattern, 1, MAX.layers) if pattern in config.names() else 6
    config.integer("sliding_window", 1, MAX.context_tokens)
    windows = sliding_windows(config, full_layer_every=every, reads_layer_types=True)
    return _model(config, has, choices, windows=windows, is_gemma3=True)


def _model(config: Record, has: Has, choices: Choices, *, windows: list[int], is_gemma3: bool = False) -> ModelSpec:
    refuse_biases(config, has)
    for field in ("attention_bias", "use_bidirectional_attention"):
        if config.has(field) and config.boolean(field):
            config.fail(field, "is true: not supported in this class")

    def cap(field: str) -> float:
        return config.number(field, MIN_SCALE, MAX_THRESHOLD) if config.has(field) else 0.0

    of_sizes = sizes(config, choices)
    scale = math.sqrt(of_sizes["head_width"] / config.number("query_pre_attn_scalar", MIN_SCALE, MAX_SCALE))
    local = [is_gemma3 and window > 0 for window in windows]
    return build_spec(
        config,
        **of_sizes,
        family=NAME,
        layer_kinds=runs_of(windows, local_positions=local),
        norm_epsilon=config.number("rms_norm_eps", 0.0, 1.0),
        norms="both",
        head_norm=is_gemma3,
        activation=choices.activation or named_activation(config, "hidden_activation", relu_may_mean_drelu=False),
        # transformers rounds the factor to the type of the weights; in float32, with which ours agrees, it is exact.
        embedding_scale=math.sqrt(of_sizes["width"]),
        attention_scale=scale,
        local_attention_scale=scale if any(local) else 1.0,
        score_cap=cap("attn_logit_softcapping"),
        logit_cap=cap("final_logit_softcapping"),
    )


FAMILY = Family(
    name=NAME,
    architectures={
        "Gemma2ForCausalLM": Architecture(
            config_class="Gemma2Config", defaults=GEMMA2_DEFAULTS, read=_gemma2, names=GEMMA2_NAMES, norm_offset=1.0
        ),
        "Gemma3ForCausalLM": Architecture(
            config_class="Gemma3TextConfig",
            defaults=GEMMA3_DEFAULTS,
            read=_gemma3,
            names=GEMMA3_NAMES,
            norm_offset=1.0,
            local_theta=LOCAL_THETA,
        ),
        "Gemma3ForConditionalGeneration": Architecture(
            config_class="Gemma3TextConfig",
            defaults=GEMMA3_DEFAULTS,
            read=_gemma3,
            names=GEMMA3_NAMES,
            harmless=OTHER_TOWERS,
            norm_offset=1.0,
            local_theta=LOCAL_THETA,
            part="text_config",
        ),
    },
    gguf={
        "gemma2": GgufArchitecture(
            interleaved=False,
            activation="gelu",
            norms="both",
            full_layer_every=2,
            window_tokens=4096,
            scales_embedding=True,
            score_cap=50.0,
            logit_cap=30.0,
            layers_scaled_by_width=46,
        ),
        "gemma3": GgufArchitecture(
            interleaved=False,
            activation="gelu",
            norms="both",
            full_layer_every=6,
            scales_embedding=True,
            local_theta=LOCAL_THETA,
            layers_scaled_by_width=62,
        ),
    },
)
