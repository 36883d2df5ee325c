"""Recurrent layers of a GGUF counterpart: their tensors, and the keys that describe them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from neuronpipe.plans.lab.counterpart_weights import Tensor
from neuronpipe.plans.models.spec import ModelSpec

ARCHITECTURES = {"deltanet": ("qwen35", "qwen35moe"), "convolution": ("lfm2", "lfm2moe")}
KIMI_LINEAR = "kimi-linear"
ONE_PART = ("nemotron_h", "nemotron_h_moe")
"""Architectures whose layers in a file are a mixer or a feed-forward."""

GRANITE = "granitehybrid"

DECAY, TIME_BIAS = -1.0, -3.0  # a memory lasts some twenty tokens


def recurrent_architecture(model: ModelSpec) -> str | None:
    """Return llama.cpp's name for the architecture of a shape with recurrent layers; None if it has none."""
    is_mixture = model.experts > 1
    if "mamba2" in model.mixers:
        return GRANITE if model.gated else ONE_PART[is_mixture]
    if "kda" in model.mixers:
        return KIMI_LINEAR
    return next((names[is_mixture] for mixer, names in ARCHITECTURES.items() if mixer in model.mixers), None)


def recurrent_tensors(model: ModelSpec, layer: int, place: str, usual: str) -> Iterator[Tensor]:
    """Yield the tensors of a recurrent layer, without its norm.

    place: the beginning of their names
    usual: encoding of the matrices that are multiplied with whole vectors
    """

    def matrix(name: str, rows: int, columns: int) -> Tensor:
        return Tensor(f"{place}.{name}.weight", rows, columns, usual)

    def plain(name: str, rows: int, columns: int, constant: float | None = None) -> Tensor:
        return Tensor(f"{place}.{name}", rows, columns, "F32", constant=constant)

    width, channels, heads, values = model.width, model.channels(layer), model.state_heads, model.state_values_width
    if model.mixers[layer] == "convolution":
        yield matrix("shortconv.in_proj", model.recurrent_rows(layer), width)
        yield plain("shortconv.conv.weight", channels, model.convolution_tokens)
        yield matrix("shortconv.out_proj", width, width)
        return
    if model.mixers[layer] == "kda":
        yield from _kda_tensors(model, layer, place, usual)
        return
    is_mamba = model.mixers[layer] == "mamba2"
    if is_mamba:
        yield matrix("ssm_in", model.recurrent_rows(layer) + heads, width)
    else:
        yield matrix("attn_qkv", channels, width)
        yield matrix("attn_gate", values, width)
        yield matrix("ssm_alpha", heads, width)
        yield matrix("ssm_beta", heads, width)
    yield plain("ssm_conv1d.weight", channels, model.convolution_tokens)
    if model.convolution_bias:
        yield plain("ssm_conv1d.bias", 0, channels, 0.0)
    of_heads = (heads, 1) if is_mamba else (0, heads)
    yield plain("ssm_a", *of_heads, DECAY)
    yield plain("ssm_dt.bias", 0, heads, TIME_BIAS)
    if is_mamba:
        yield plain("ssm_d", heads, 1, 1.0)
    groups = model.state_norm_groups
    normed = (groups, values // groups) if is_mamba else (0, model.state_value_width)
    yield plain("ssm_norm.weight", *normed, 1.0)
    yield matrix("ssm_out", width, values)


def _kda_tensors(model: ModelSpec, layer: int, place: str, usual: str) -> Iterator[Tensor]:
    keys, values, rank = model.state_keys_width, model.state_values_width, model.state_rank
    for part, rows in (("q", keys), ("k", keys), ("v", values)):
        yield Tensor(f"{place}.attn_{part}.weight", rows, model.width, usual)
        yield Tensor(f"{place}.ssm_conv1d_{part}.weight", 1, model.convolution_tokens, "F32", stacked=rows)
    for part, rows in (("f", model.decays_width(layer)), ("g", values)):
        yield Tensor(f"{place}.ssm_{part}_a.weight", rank, model.width, usual)
        yield Tensor(f"{place}.ssm_{part}_b.weight", rows, rank, usual)
    yield Tensor(f"{place}.ssm_beta.weight", model.state_heads, model.width, usual)
    yield Tensor(f"{place}.ssm_a", model.state_heads, 1, "F32", constant=DECAY)
    yield Tensor(f"{place}.ssm_dt.bias", 0, model.decays_width(layer), "F32", constant=TIME_BIAS)
    yield Tensor(f"{place}.ssm_norm.weight", 0, model.state_value_width, "F32", constant=1.0)
    yield Tensor(f"{place}.attn_output.weight", model.width, values, usual)


def recurrent_keys(model: ModelSpec) -> dict[str, Any]:
    """Return the keys that describe recurrent layers, after the architecture's name; nothing if there are none."""
    name = recurrent_architecture(model)
    if name is None:
        return {}
    if "convolution" in model.mixers:
        return {"shortconv.l_cache": model.convolution_tokens, "attention.head_count_kv": _key_heads(model, name)}
    if name == KIMI_LINEAR:
        return {
            "ssm.conv_kernel": model.convolution_tokens,
            "kda.head_dim": model.state_key_width,
            "attention.head_count_kv": _key_heads(model, name),
        }
    sizes = {
        "ssm.conv_kernel": model.convolution_tokens,
        "ssm.state_size": model.state_key_width,
        "ssm.group_count": model.state_key_heads,
        "ssm.time_step_rank": model.state_heads,
        "ssm.inner_size": model.state_values_width,
    }
    if name in ONE_PART:
        return sizes | {
            "attention.head_count_kv": _key_heads(model, name),
            "feed_forward_length": [model.neurons * (part == "feed_forward") for part in _parts(model, name)],
            "attention.layer_norm_epsilon": model.norm_epsilon,
            "block_count": len(_parts(model, name)),
            "expert_shared_feed_forward_length": model.shared_experts * model.neurons,
        }
    if name == GRANITE:
        return sizes | {
            "attention.head_count_kv": _key_heads(model, name),
            "expert_shared_feed_forward_length": model.shared_experts * model.neurons,
            "rope.scaling.finetuned": any(model.rotary_layers),
            "attention.scale": model.attention_scale / math.sqrt(model.head_width),
            "embedding_scale": model.embedding_scale,
            "residual_scale": model.residual_scale,
            "logit_scale": 1 / model.logit_scale,
        }
    return sizes | {
        "attention.recurrent_layers": [mixer != "attention" for mixer in model.mixers],
        "full_attention_interval": model.mixers.index("attention") + 1,
        "rope.dimension_sections": [11, 11, 10, 0],
        "expert_shared_feed_forward_length": model.shared_experts * model.neurons,
    }


def _key_heads(model: ModelSpec, name: str) -> list[int]:
    return [model.key_heads * (part == "attention") for part in _parts(model, name)]


def _parts(model: ModelSpec, name: str) -> list[str]:
    """Return the mixer of each layer in a file; or `feed_forward`, where that is a layer of its own."""
    if name not in ONE_PART:
        return list(model.mixers)
    of_layers = zip(model.mixers, model.ffn_layers, strict=True)
    parts = [part for mixer, has_ffn in of_layers for part in (mixer, "feed_forward" if has_ffn else "none")]
    return [part for part in parts if part != "none"]
