"""Llama and models built like it: Mistral, Qwen2 and the text of Qwen2-VL, Bamboo. RMS norms, rotary positions, a gated
feed-forward.

transformers writes every key that it knows into config.json. Files from other programs lack some, and the defaults of
missing keys change results: a Mistral without `sliding_window` has an attention window of 4096 tokens. Tests compare
the defaults below with those of transformers (tests/conformance/golden).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from neuronpipe.plans.models.configuration import (
    GATED_DEFAULTS,
    GATED_HARMLESS,
    GATED_NAMES,
    PREDICTOR,
    biases,
    gated_activation,
    gated_model,
    refuse_biases,
    sliding_windows,
    windows_of_qwen,
)
from neuronpipe.plans.models.family import SAY_WHICH, Architecture, Choices, Family, GgufArchitecture
from neuronpipe.plans.models.spec import MAX, Activation, ModelSpec
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import quoted

NAME = "llama"
Has = Callable[[str], bool]


def _llama(config: Record, has: Has, choices: Choices) -> ModelSpec:
    stated = biases(config, has)
    if not stated["qkv_bias"] and has("model.layers.0.self_attn.q_proj.bias"):
        config.fail(
            "attention_bias", "is not true, but the checkpoint has biases of self_attn.q_proj; say which is right"
        )
    # Some converted models have no bias of o_proj; transformers makes up zeros.
    stated["output_bias"] &= has("model.layers.0.self_attn.o_proj.bias")
    windows = [0] * config.integer("num_hidden_layers", 1, MAX.layers)
    activation = gated_activation(config, has, choices.activation)
    return gated_model(config, choices, family=NAME, activation=activation, windows=windows, **stated)


def _mistral(config: Record, has: Has, choices: Choices) -> ModelSpec:
    refuse_biases(config, has)
    windows = sliding_windows(config, reads_layer_types=False)
    activation = gated_activation(config, has, choices.activation)
    return gated_model(config, choices, family=NAME, activation=activation, windows=windows, qkv_bias=False)


def _qwen2(config: Record, has: Has, choices: Choices) -> ModelSpec:
    refuse_biases(config, has)
    activation = gated_activation(config, has, choices.activation, relu_may_mean_drelu=True)
    windows = windows_of_qwen(config)
    # modeling_qwen2.py always gives biases to queries, keys and values.
    return gated_model(config, choices, family=NAME, activation=activation, windows=windows, qkv_bias=True)


def _bamboo(config: Record, has: Has, choices: Choices) -> ModelSpec:
    """Return the description of a Bamboo or TurboSparse-Mistral, which share this class; only TurboSparse has
    predictors. Both compute dReLU: the class applies relu, the configured activation, to gate and to up."""
    refuse_biases(config, has)
    activation: Activation = "drelu"
    if choices.activation is not None:
        activation = choices.activation
    elif (stated := config.text("hidden_act")) not in ("relu", "drelu"):
        model_name = "TurboSparse-Mistral" if has(PREDICTOR) else "Bamboo"
        config.fail("hidden_act", f"is {quoted(stated)}, but {model_name} says relu and means drelu; {SAY_WHICH}")
    windows = sliding_windows(config, reads_layer_types=False)
    return gated_model(config, choices, family=NAME, activation=activation, windows=windows, qkv_bias=False)


# MistralConfig in transformers/models/mistral/configuration_mistral.py.
MISTRAL_DEFAULTS = {
    **GATED_DEFAULTS,
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096 * 32,
    "sliding_window": 4096,
    "eos_token_id": 2,
}
# LlamaConfig in transformers/models/llama/configuration_llama.py. num_key_value_heads: None means as many as heads.
LLAMA_DEFAULTS = {
    **GATED_DEFAULTS,
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
    "eos_token_id": 2,
}
# Qwen2Config in transformers/models/qwen2/configuration_qwen2.py.
QWEN2_DEFAULTS = {
    **GATED_DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
    "eos_token_id": None,
}
# Qwen2VLTextConfig and Qwen2_5_VLTextConfig in transformers/models/qwen2_vl and qwen2_5_vl.
QWEN2_VL_DEFAULTS = {
    **QWEN2_DEFAULTS,
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "max_window_layers": 80,
    "eos_token_id": 151645,
}
QWEN_VISION = r"(model\.)?visual\..*"


def _architecture(
    config_class: str, defaults: Mapping[str, Any], read: Callable[[Record, Has, Choices], ModelSpec]
) -> Architecture:
    return Architecture(
        config_class=config_class, defaults=defaults, read=read, names=GATED_NAMES, harmless=GATED_HARMLESS
    )


def _qwen2_vl(config_class: str) -> Architecture:
    qwen2 = _architecture(config_class, QWEN2_VL_DEFAULTS, _qwen2)
    return replace(qwen2, harmless=rf"{GATED_HARMLESS}|{QWEN_VISION}", part="text_config")


FAMILY = Family(
    name=NAME,
    architectures={
        "LlamaForCausalLM": _architecture("LlamaConfig", LLAMA_DEFAULTS, _llama),
        "MistralForCausalLM": _architecture("MistralConfig", MISTRAL_DEFAULTS, _mistral),
        "Qwen2ForCausalLM": _architecture("Qwen2Config", QWEN2_DEFAULTS, _qwen2),
        "Qwen2VLForConditionalGeneration": _qwen2_vl("Qwen2VLTextConfig"),
        "Qwen2_5_VLForConditionalGeneration": _qwen2_vl("Qwen2_5_VLTextConfig"),
        # BambooConfig in configuration_bamboo.py of the models' own repositories (PowerInfer/Bamboo-base-v0_1).
        "BambooForCausalLM": _architecture("BambooConfig", MISTRAL_DEFAULTS, _bamboo),
    },
    gguf={
        "llama": GgufArchitecture(interleaved=True),
        "qwen2": GgufArchitecture(interleaved=False, qkv_bias=True, relu_may_mean_drelu=True),
        "qwen2vl": GgufArchitecture(interleaved=False, qkv_bias=True),
    },
)
