"""The tensors of checkpoints with recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.conformance.random_tensors import Array, Maker, random_tensor, rounded
from tests.conformance.recipes import Recipe

RECURRENT_CLASSES = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")


def recurrent_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    """Memories decay so slowly that tokens far away count. Stored norms lack 1, those of DeltaNet's outputs do not."""
    generator = np.random.PCG64(recipe.seed)
    width, settings = recipe.width, recipe.config

    def made(name: str, shape: tuple[int, ...], deviation: float, centre: float = 0.0) -> tuple[str, Array]:
        return name, rounded(random_tensor(generator, shape, deviation) + np.float32(centre), recipe.dtype)

    def linear(name: str, rows: int, columns: int, gain: float) -> tuple[str, Array]:
        return made(f"{name}.weight", (rows, columns), gain * columns**-0.5)

    def gated(name: str, neurons: int) -> Iterator[tuple[str, Array]]:
        yield linear(f"{name}gate_proj", neurons, width, 1.0)
        yield linear(f"{name}up_proj", neurons, width, 1.0)
        yield linear(f"{name}down_proj", width, neurons, 0.5)

    def mixture(name: str) -> Iterator[tuple[str, Array]]:
        experts, neurons = recipe.experts, recipe.neurons
        yield linear(f"{name}.mlp.gate", experts, width, 1.5)
        if recipe.architecture == "Qwen3_5MoeForCausalLM":  # as published
            yield made(f"{name}.mlp.experts.gate_up_proj", (experts, 2 * neurons, width), width**-0.5)
            yield made(f"{name}.mlp.experts.down_proj", (experts, width, neurons), 0.5 * neurons**-0.5)
        else:
            for number in range(experts):
                yield from gated(f"{name}.mlp.experts.{number}.", neurons)
        yield from gated(f"{name}.mlp.shared_expert.", recipe.shared)
        yield linear(f"{name}.mlp.shared_expert_gate", 1, width, 1.5)

    def delta(name: str) -> Iterator[tuple[str, Array]]:
        heads, key_heads = settings["linear_num_value_heads"], settings["linear_num_key_heads"]
        keys, values = key_heads * settings["linear_key_head_dim"], heads * settings["linear_value_head_dim"]
        if recipe.architecture == "Qwen3NextForCausalLM":
            yield linear(f"{name}.in_proj_qkvz", 2 * keys + 2 * values, width, 1.3)
            yield linear(f"{name}.in_proj_ba", 2 * heads, width, 1.0)
        else:
            yield linear(f"{name}.in_proj_qkv", 2 * keys + values, width, 1.3)
            yield linear(f"{name}.in_proj_z", values, width, 1.3)
            yield linear(f"{name}.in_proj_b", heads, width, 1.0)
            yield linear(f"{name}.in_proj_a", heads, width, 1.0)
        yield made(f"{name}.conv1d.weight", (2 * keys + values, 1, settings["linear_conv_kernel_dim"]), 0.5)
        yield made(f"{name}.A_log", (heads,), 1.0, -2.0)
        yield made(f"{name}.dt_bias", (heads,), 0.5, -1.0)
        yield made(f"{name}.norm.weight", (settings["linear_value_head_dim"],), 0.3, 1.0)
        yield linear(f"{name}.out_proj", width, values, 0.5)

    def attention(name: str) -> Iterator[tuple[str, Array]]:
        heads, keys = recipe.query_heads * recipe.head_width, recipe.key_heads * recipe.head_width
        yield linear(f"{name}.q_proj", 2 * heads, width, 1.3)
        yield linear(f"{name}.k_proj", keys, width, 1.3)
        yield linear(f"{name}.v_proj", keys, width, 1.3)
        yield made(f"{name}.q_norm.weight", (recipe.head_width,), 0.3, 0.2)
        yield made(f"{name}.k_norm.weight", (recipe.head_width,), 0.3, 0.2)
        yield linear(f"{name}.o_proj", width, heads, 0.7)

    yield made("model.embed_tokens.weight", (recipe.vocabulary, width), 5 * width**-0.5 if recipe.tied else 1.0)
    every = settings.get("full_attention_interval", 4)
    for layer in range(recipe.layers):
        name = f"model.layers.{layer}"
        yield made(f"{name}.input_layernorm.weight", (width,), 0.1)
        yield from attention(f"{name}.self_attn") if (layer + 1) % every == 0 else delta(f"{name}.linear_attn")
        yield made(f"{name}.post_attention_layernorm.weight", (width,), 0.1)
        if recipe.experts and layer not in recipe.dense:
            yield from mixture(name)
        else:
            yield from gated(f"{name}.mlp.", settings.get("intermediate_size", recipe.neurons))
    yield made("model.norm.weight", (width,), 0.1)
    if not recipe.tied:
        yield linear("lm_head", recipe.vocabulary, width, 5.0)


def lfm2_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    make, width, settings = Maker(recipe), recipe.width, recipe.config

    def gated(name: str, neurons: int) -> Iterator[tuple[str, Array]]:
        yield make.linear(f"{name}.w1", neurons, width, 1.0)
        yield make.linear(f"{name}.w3", neurons, width, 1.0)
        yield make.linear(f"{name}.w2", width, neurons, 0.5)

    yield make.made("model.embed_tokens.weight", (recipe.vocabulary, width), 5 * width**-0.5)
    for layer, kind in enumerate(settings["layer_types"]):
        name = f"model.layers.{layer}"
        yield make.norm(f"{name}.operator_norm")
        if kind == "conv":
            yield make.linear(f"{name}.conv.in_proj", 3 * width, width, 1.0)
            yield make.made(f"{name}.conv.conv.weight", (width, 1, settings.get("conv_L_cache", 3)), 0.6)
            yield make.linear(f"{name}.conv.out_proj", width, width, 0.7)
        else:
            yield from make.attention(f"{name}.self_attn", "out_proj")
            yield make.norm(f"{name}.self_attn.q_layernorm", recipe.head_width)
            yield make.norm(f"{name}.self_attn.k_layernorm", recipe.head_width)
        yield make.norm(f"{name}.ffn_norm")
        if not recipe.experts:
            yield from gated(f"{name}.feed_forward", 240)  # 300 * 2 / 3, times 1.1, rounded up to a multiple of 40
        elif layer in recipe.dense:
            yield from gated(f"{name}.feed_forward", settings["intermediate_size"])
        else:
            yield make.linear(f"{name}.feed_forward.gate", recipe.experts, width, 1.5)
            yield make.made(f"{name}.feed_forward.expert_bias", (recipe.experts,), 0.2)
            for number in range(recipe.experts):
                yield from gated(f"{name}.feed_forward.experts.{number}", recipe.neurons)
    yield make.norm("model.embedding_norm")


def nemotron_h_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    make, width, settings = Maker(recipe), recipe.width, recipe.config
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    blocks = settings.get("layers_block_type") or [kinds[block] for block in settings["hybrid_override_pattern"]]

    def plain(name: str, neurons: int) -> Iterator[tuple[str, Array]]:
        yield make.linear(f"{name}.up_proj", neurons, width, 1.0)
        yield make.linear(f"{name}.down_proj", width, neurons, 0.5)

    yield make.made("backbone.embeddings.weight", (recipe.vocabulary, width), 1.0)
    for number, block in enumerate(blocks):
        name = f"backbone.layers.{number}"
        yield make.norm(f"{name}.norm")
        if block == "linear_attention":
            sizes = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
            yield from make.mamba(f"{name}.mixer", *(settings[size] for size in sizes))
        elif block == "full_attention":
            yield from make.attention(f"{name}.mixer")
        elif block == "mlp":
            yield from plain(f"{name}.mixer", settings.get("intermediate_size", recipe.neurons))
        else:
            yield make.linear(f"{name}.mixer.gate", recipe.experts, width, 1.5)
            yield make.made(f"{name}.mixer.gate.e_score_correction_bias", (recipe.experts,), 0.2)
            for expert in range(recipe.experts):
                yield from plain(f"{name}.mixer.experts.{expert}", recipe.neurons)
            yield from plain(f"{name}.mixer.shared_experts", recipe.shared)
    yield make.norm("backbone.norm_f")
    yield make.linear("lm_head", recipe.vocabulary, width, 5.0)


def granite_hybrid_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    make, width, settings = Maker(recipe), recipe.width, recipe.config
    yield make.made("model.embed_tokens.weight", (recipe.vocabulary, width), 5 * width**-0.5 if recipe.tied else 1.0)
    for layer, kind in enumerate(settings["layer_types"]):
        name, shared = f"model.layers.{layer}", settings["shared_intermediate_size"]
        yield make.norm(f"{name}.input_layernorm")
        if kind == "mamba":
            yield from _mamba_of_granite(make, settings, width, name)
        else:
            yield from make.attention(f"{name}.self_attn")
        yield make.norm(f"{name}.post_attention_layernorm")
        yield make.linear(f"{name}.shared_mlp.input_linear", 2 * shared, width, 1.0)
        yield make.linear(f"{name}.shared_mlp.output_linear", width, shared, 0.5)
        if recipe.experts:
            mixture, experts, neurons = f"{name}.block_sparse_moe", recipe.experts, recipe.neurons
            yield make.linear(f"{mixture}.router.layer", experts, width, 1.5)
            yield make.made(f"{mixture}.input_linear.weight", (experts, 2 * neurons, width), width**-0.5)
            yield make.made(f"{mixture}.output_linear.weight", (experts, width, neurons), 0.5 * neurons**-0.5)
    yield make.norm("model.norm")
    if not recipe.tied:
        yield make.linear("lm_head", recipe.vocabulary, width, 5.0)


def _mamba_of_granite(make: Maker, settings: dict[str, Any], width: int, name: str) -> Iterator[tuple[str, Array]]:
    heads, inner = settings["mamba_n_heads"], settings["mamba_expand"] * width
    of_mamba = (settings["mamba_d_state"], settings["mamba_n_groups"], settings["mamba_d_conv"])
    yield from make.mamba(f"{name}.mamba", heads, inner // heads, *of_mamba)


def bamba_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    make, width, settings = Maker(recipe), recipe.width, recipe.config
    yield make.made("model.embed_tokens.weight", (recipe.vocabulary, width), 1.0)
    for layer in range(recipe.layers):
        name = f"model.layers.{layer}"
        yield make.norm(f"{name}.input_layernorm")
        if layer in settings["attn_layer_indices"]:
            yield from make.attention(f"{name}.self_attn")
        else:
            yield from _mamba_of_granite(make, settings, width, name)
        yield make.norm(f"{name}.pre_ff_layernorm")
        for part, (rows, columns) in {
            "gate": (recipe.neurons, width),
            "up": (recipe.neurons, width),
            "down": (width, recipe.neurons),
        }.items():
            yield make.linear(f"{name}.feed_forward.{part}_proj", rows, columns, 0.5 if part == "down" else 1.0)
    yield make.norm("model.final_layernorm")
    yield make.linear("lm_head", recipe.vocabulary, width, 5.0)
