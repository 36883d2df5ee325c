"""StableLM: like Llama with LayerNorm, rotary positions on a part of each head, and in some sizes attention and
feed-forward in parallel, after one norm. Norms of queries and keys, as in StableLM 2 12B, are not supported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from neuronpipe.plans.models.configuration import GATED_DEFAULTS, GATED_NAMES, build_spec, gated_activation, sizes
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture, TensorNames
from neuronpipe.plans.models.spec import MAX, LayerKind, ModelSpec
from neuronpipe.plans.strict_json import Record

NAME = "stablelm"

# StableLmConfig in transformers/models/stablelm/configuration_stablelm.py.
DEFAULTS = {
    **{name: value for name, value in GATED_DEFAULTS.items() if name != "rms_norm_eps"},
    "vocab_size": 50304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25,
    "use_qkv_bias": False,
    "qk_layernorm": False,
    "use_parallel_residual": False,
    "eos_token_id": 0,
}


def _names(config: Record) -> TensorNames:
    parallel = config.boolean("use_parallel_residual")
    return replace(GATED_NAMES, ffn_norm="input_layernorm") if parallel else GATED_NAMES


def _read(config: Record, has: Callable[[str], bool], choices: Choices) -> ModelSpec:
    if config.boolean("qk_layernorm"):
        config.fail("qk_layernorm", "is true: norms of queries and keys are not supported in this class")
    return build_spec(
        config,
        **sizes(config, choices),
        family=NAME,
        layer_kinds=(LayerKind(config.integer("num_hidden_layers", 1, MAX.layers)),),
        norm="layer",
        norm_epsilon=config.number("layer_norm_eps", 0.0, 1.0),
        activation=gated_activation(config, has, choices.activation),
        qkv_bias=config.boolean("use_qkv_bias"),
        parallel=config.boolean("use_parallel_residual"),
    )


FAMILY = Family(
    name=NAME,
    architectures={
        "StableLmForCausalLM": Architecture(
            config_class="StableLmConfig", defaults=DEFAULTS, read=_read, names=_names, partial_rotary=True
        ),
    },
    gguf={
        "stablelm": GgufArchitecture(interleaved=False, norm="layer", partial_rotary=True, parallel="one norm"),
    },
)
