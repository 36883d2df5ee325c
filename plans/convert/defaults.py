"""What a key that a config.json leaves out means: what transformers' configuration class of that architecture fills in.

transformers writes every key it knows, but files made by hand or by other programs do not, and what is missing decides
results: a Mistral without `sliding_window` has a window of 4096. `null` is not missing: it means what the class does
with None. The test compares this table with one taken from transformers itself (tests/conformance/golden).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Defaults(NamedTuple):
    """Of one configuration class: its name, and by key what it fills in. Keys that it does not have are not read."""

    owner: str
    values: Mapping[str, Any]


# rope_theta: RotaryEmbeddingConfigMixin.default_theta in transformers/modeling_rope_utils.py, and in transformers 4 a
# default of each class. head_dim: None means hidden_size / num_attention_heads, in all four (Qwen2: modeling_qwen2.py).
_ALL = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "rope_parameters": None,
}

# MistralConfig in transformers/models/mistral/configuration_mistral.py.
_MISTRAL = {
    **_ALL,
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096 * 32,
    "sliding_window": 4096,
    "eos_token_id": 2,
}

DEFAULTS = {
    # LlamaConfig in transformers/models/llama/configuration_llama.py. num_key_value_heads: None means as many as heads.
    "LlamaForCausalLM": Defaults(
        "LlamaConfig",
        {
            **_ALL,
            "vocab_size": 32000,
            "intermediate_size": 11008,
            "num_key_value_heads": None,
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "mlp_bias": False,
            "eos_token_id": 2,
        },
    ),
    "MistralForCausalLM": Defaults("MistralConfig", _MISTRAL),
    # Qwen2Config in transformers/models/qwen2/configuration_qwen2.py. Its sliding_window counts with use_sliding_window
    # only, and only from layer max_window_layers on, unless layer_types says which layers have it.
    "Qwen2ForCausalLM": Defaults(
        "Qwen2Config",
        {
            **_ALL,
            "vocab_size": 151936,
            "intermediate_size": 22016,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "layer_types": None,
            "eos_token_id": None,
        },
    ),
    # BambooConfig in configuration_bamboo.py of the models' own repositories (PowerInfer/Bamboo-base-v0_1): Mistral's.
    "BambooForCausalLM": Defaults("BambooConfig", _MISTRAL),
}
