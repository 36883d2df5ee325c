"""Nemotron-H and Nemotron-3: blocks of Mamba-2, attention without positions, and feed-forwards with ReLU² and no gate.

A block has one part only. Here a mixer and the feed-forward that follows it are one layer, and a block without such a
neighbour is a layer without the other part. A mixture's experts have no gate either. transformers bounds the time of a
token from below, by a field that its authors' code reads for the initial values only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from neuronpipe.plans.models.configuration import FULL, build_spec, sizes
from neuronpipe.plans.models.family import (
    Architecture,
    Choices,
    Family,
    GgufArchitecture,
    TensorNames,
    named_activation,
)
from neuronpipe.plans.models.mixture_configuration import deepseek_mixture
from neuronpipe.plans.models.recurrent_sizes import Mixer
from neuronpipe.plans.models.recurrent_tensors import mamba_tensors
from neuronpipe.plans.models.spec import MAX, MAX_CONVOLUTION, ModelSpec, runs_of
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import quoted

NAME = "nemotron_h"
Has = Callable[[str], bool]
PATTERN_KEY = "hybrid_override_pattern"
PATTERN = {"M": "mamba2", "*": "attention", "E": "experts", "-": "dense"}
MIXERS: dict[str, Mixer] = {"mamba2": "mamba2", "attention": "attention"}
BLOCKS = {
    "linear_attention": "mamba2",
    "mamba": "mamba2",
    FULL: "attention",
    "attention": "attention",
    "moe": "experts",
    "mlp": "dense",
}

DEFAULT_BLOCKS = ["mamba2", "experts", "attention", "dense"]

# NemotronHConfig in transformers/models/nemotron_h/configuration_nemotron_h.py. hybrid_override_pattern: an older form
# of the list of blocks.
DEFAULTS = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "layers_block_type": None,
    "layer_types": None,
    PATTERN_KEY: None,
    "tie_word_embeddings": False,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "intermediate_size": 21_504,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "n_groups": 8,
    "conv_kernel": 4,
    "time_step_min": 0.001,
    "use_conv_bias": True,
    "mamba_proj_bias": False,
    "use_bias": False,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "moe_latent_size": None,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 10_000.0,
    "rope_parameters": None,
    "eos_token_id": 2,
}


# Keys of older files, by which the class replaces the others.
RENAMED = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}


class Layer(NamedTuple):
    """A layer that is made of one or two blocks.

    mixer, feed_forward: the numbers of its blocks; None: it has no such part
    """

    mixer: int | None
    kind: Mixer
    feed_forward: int | None
    is_dense: bool


def _blocks(config: Record) -> list[str]:
    keys = ("layers_block_type", "layer_types", PATTERN_KEY)
    key = next((key for key in keys if key in config.names() and config.has(key)), None)
    if key is None:
        return DEFAULT_BLOCKS
    table = PATTERN if key == PATTERN_KEY else BLOCKS
    listed = list(config.text(key)) if table is PATTERN else config.items(key)
    if not 1 <= len(listed) <= MAX.layers or not all(isinstance(name, str) and name in table for name in listed):
        config.fail(key, f"{quoted(listed)} is no list of {', '.join(table)}")
    return [table[name] for name in listed]


def _layers(config: Record) -> list[Layer]:
    layers: list[Layer] = []
    for number, block in enumerate(_blocks(config)):
        if block in MIXERS:
            layers.append(Layer(number, MIXERS[block], None, False))
        elif layers and layers[-1].feed_forward is None:
            layers[-1] = layers[-1]._replace(feed_forward=number, is_dense=block == "dense")
        else:
            layers.append(Layer(None, "none", number, block == "dense"))
    return layers


def layers_of_blocks(model: ModelSpec) -> list[int]:
    """Return for each block of Nemotron-H, from the first, the number of the layer that it is a part of."""
    parts = zip(model.mixers, model.ffn_layers, strict=True)
    counts = [(mixer != "none") + has_ffn for mixer, has_ffn in parts]
    return [layer for layer, count in enumerate(counts) for _ in range(count)]


def _names(config: Record) -> TensorNames:
    layers, is_mixture = _layers(config), "experts" in _blocks(config)
    return TensorNames(
        embedding="backbone.embeddings",
        output="lm_head",
        output_norm="backbone.norm_f",
        layer="backbone.layers.{}.",
        blocks=tuple((layer.mixer or 0, layer.feed_forward or 0) for layer in layers),
        attention_norm="norm",
        ffn_norm="norm",
        query="mixer.q_proj",
        key="mixer.k_proj",
        value="mixer.v_proj",
        attention_output="mixer.o_proj",
        router="mixer.gate",
        choosing_bias="mixer.gate.e_score_correction_bias",
        shared="mixer.shared_experts.{}_proj",
        dense="mixer.{}_proj",
        expert="mixer.experts.{}.",
        up="up_proj" if is_mixture else "mixer.up_proj",
        down="down_proj" if is_mixture else "mixer.down_proj",
        recurrent=lambda model, layer: mamba_tensors(model, "mixer"),
    )


def _read(config: Record, has: Has, choices: Choices) -> ModelSpec:
    for key in ("attention_bias", "mlp_bias", "mamba_proj_bias", "use_bias"):
        if config.boolean(key):
            config.fail(key, "is true: not supported in this class")
    if config.has("moe_latent_size"):
        config.fail("moe_latent_size", "experts that read a latent are not supported")
    if config.text("mamba_hidden_act") not in ("silu", "swish"):
        config.fail("mamba_hidden_act", f"{quoted(config.text('mamba_hidden_act'))} is not supported; silu is")
    layers, blocks = _layers(config), _blocks(config)
    is_mixture = "experts" in blocks
    neurons = "moe_intermediate_size" if is_mixture else "intermediate_size"
    of_sizes = sizes(config, choices, neurons)
    # The class never ties its output to the embedding.
    of_sizes["tied_embeddings"] &= not has("lm_head.weight")
    wide = config.integer("intermediate_size", 1, MAX.neurons)
    dense_parts = -(-wide // of_sizes["neurons"]) if is_mixture else 0
    return build_spec(
        config,
        **of_sizes,
        **(_mixture(config, of_sizes["neurons"]) if is_mixture else {}),
        **(_recurrent(config) if "mamba2" in blocks else {}),
        family=NAME,
        layer_kinds=runs_of(
            [0] * len(layers),
            [layer.kind != "attention" for layer in layers],
            [dense_parts if layer.is_dense else 0 for layer in layers],
            mixers=[layer.kind for layer in layers],
            feed_forward=[layer.feed_forward is not None for layer in layers],
        ),
        norm_epsilon=config.number("layer_norm_epsilon", 0.0, 1.0),
        activation=choices.activation or named_activation(config, "mlp_hidden_act", relu_may_mean_drelu=False),
        gated=False,
    )


def _mixture(config: Record, neurons: int) -> dict[str, object]:
    # The class has shared experts of this width whatever n_shared_experts says.
    shared = -(-config.integer("moe_shared_expert_intermediate_size", 1, MAX.neurons) // neurons)
    return deepseek_mixture(config)._replace(shared_experts=shared)._asdict()


def _recurrent(config: Record) -> dict[str, object]:
    groups = config.integer("n_groups", 1, MAX.query_heads)
    return {
        "state_heads": config.integer("mamba_num_heads", 1, MAX.query_heads),
        "state_key_heads": groups,
        "state_key_width": config.integer("ssm_state_size", 1, MAX.head_width),
        "state_value_width": config.integer("mamba_head_dim", 1, MAX.head_width),
        "state_norm_groups": groups,
        "convolution_tokens": config.integer("conv_kernel", 1, MAX_CONVOLUTION),
        "convolution_bias": config.boolean("use_conv_bias"),
        "min_time_step": config.number("time_step_min", 0.0, 1.0),
    }


FAMILY = Family(
    name=NAME,
    architectures={
        "NemotronHForCausalLM": Architecture(
            config_class="NemotronHConfig",
            defaults=DEFAULTS,
            read=_read,
            names=_names,
            harmless=r"mtp\..*",
            renamed=RENAMED,
        ),
    },
    gguf=dict.fromkeys(
        ("nemotron_h", "nemotron_h_moe"),
        GgufArchitecture(
            interleaved=False,
            activation="relu2",
            gated=False,
            router="sigmoid",
            ffn_norm="attn_norm",
            recurrent="mamba2",
            one_part=True,
            rotated=False,
        ),
    ),
)
