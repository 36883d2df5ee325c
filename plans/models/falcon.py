"""Falcon: attention and a feed-forward of Up and Down in parallel, after one LayerNorm (7B) or two (40B, 180B).

Falcon itself has GELU, whose neurons always fire and which is not supported. ReluFalcon-40B is Falcon-40B with ReLU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from neuronpipe.plans.models.configuration import build_spec, context_tokens
from neuronpipe.plans.models.family import Architecture, Choices, Family, GgufArchitecture, TensorNames
from neuronpipe.plans.models.spec import MAX, Activation, LayerKind, ModelSpec
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import quoted

NAME = "falcon"

# FalconConfig in transformers/models/falcon/configuration_falcon.py.
DEFAULTS = {
    "vocab_size": 65024,
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "num_ln_in_parallel_attn": None,  # two with new_decoder_architecture, else one
    "layer_norm_epsilon": 1e-5,
    "num_kv_heads": None,  # as many as heads
    "alibi": False,
    "new_decoder_architecture": False,
    "multi_query": True,
    "parallel_attn": True,
    "bias": False,
    "max_position_embeddings": 2048,
    "rope_theta": 10_000.0,
    "rope_parameters": None,
    "ffn_hidden_size": None,  # four times hidden_size
    "activation": "gelu",
    "tie_word_embeddings": True,
    "eos_token_id": 11,
}

# A package stores a single norm twice: at most 65 KB a layer, and simpler than another kind of layer.
ONE_NORM = TensorNames(
    embedding="transformer.word_embeddings",
    output="lm_head",
    output_norm="transformer.ln_f",
    layer="transformer.h.{}.",
    attention_norm="input_layernorm",
    ffn_norm="input_layernorm",
    query_key_value="self_attention.query_key_value",
    attention_output="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)
TWO_NORMS = replace(ONE_NORM, attention_norm="ln_attn", ffn_norm="ln_mlp")


def _names(config: Record) -> TensorNames:
    field = "num_ln_in_parallel_attn"
    norms = config.integer(field, 1, 2) if config.has(field) else 1 + config.boolean("new_decoder_architecture")
    return TWO_NORMS if norms == 2 else ONE_NORM


def _key_heads(config: Record, query_heads: int) -> int:
    if config.boolean("new_decoder_architecture"):
        return config.integer("num_kv_heads", 1, MAX.key_heads) if config.has("num_kv_heads") else query_heads
    return 1 if config.boolean("multi_query") else query_heads


def grouped_rows(_: Record, model: ModelSpec) -> list[int]:
    """Return the numbers of the joined tensor's rows in the order queries, keys, values. The tensor has one group for
    each key head: its queries, its key, its value."""
    group = model.query_heads // model.key_heads
    group_rows = (group + 2) * model.head_width  # of one key head
    queries, keys, values = range(group), range(group, group + 1), range(group + 1, group + 2)
    return [
        number * group_rows + head * model.head_width + row
        for heads in (queries, keys, values)
        for number in range(model.key_heads)
        for head in heads
        for row in range(model.head_width)
    ]


def _activation(config: Record, requested: Activation | None) -> Activation:
    if requested is not None:
        return requested
    if (stated := config.text("activation")) != "relu":
        config.fail(
            "activation",
            f"{quoted(stated)} is not supported, and it is what Falcon itself has; ReluFalcon has relu: "
            "if this is that model, pass --activation relu",
        )
    return "relu"


def _read(config: Record, _: Callable[[str], bool], choices: Choices) -> ModelSpec:
    if config.boolean("alibi"):
        config.fail("alibi", "is true: positions by ALiBi are not supported, rotary ones are")
    if not config.boolean("parallel_attn"):
        config.fail("parallel_attn", "is false: attention before the feed-forward is not supported in this class")
    width = config.integer("hidden_size", 1, MAX.width)
    query_heads = config.integer("num_attention_heads", 1, MAX.query_heads)
    if width % query_heads:
        config.fail("num_attention_heads", f"{query_heads} does not divide hidden_size, {width}")
    bias = config.boolean("bias")
    return build_spec(
        config,
        family=NAME,
        width=width,
        neurons=config.integer("ffn_hidden_size", 1, MAX.neurons) if config.has("ffn_hidden_size") else 4 * width,
        layer_kinds=(LayerKind(config.integer("num_hidden_layers", 1, MAX.layers)),),
        query_heads=query_heads,
        key_heads=_key_heads(config, query_heads),
        head_width=width // query_heads,
        vocabulary=config.integer("vocab_size", 1, MAX.vocabulary),
        context_tokens=context_tokens(config, choices.context_tokens),
        norm="layer",
        norm_epsilon=config.number("layer_norm_epsilon", 0.0, 1.0),
        activation=_activation(config, choices.activation),
        gated=False,
        qkv_bias=bias,
        output_bias=bias,
        ffn_bias=bias,
        tied_embeddings=config.boolean("tie_word_embeddings"),
        parallel=True,
    )


# In files of llama.cpp a single norm is named attn_norm; of two norms, attention's is attn_norm_2.
GGUF = GgufArchitecture(interleaved=False, norm="layer", gated=False, parallel="always", activation=None)

FAMILY = Family(
    name=NAME,
    gguf={"falcon": GGUF},
    architectures={
        "FalconForCausalLM": Architecture(
            config_class="FalconConfig",
            defaults=DEFAULTS,
            read=_read,
            names=_names,
            joined_rows=grouped_rows,
            harmless=r"transformer\.h\.\d+\.self_attention\.(maybe_rotary|rotary_emb)\.inv_freq",
        ),
    },
)
