"""Recurrent layers of a GGUF counterpart: their tensors, and the keys that describe them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from neuronpipe.plans.models.spec import ModelSpec

ARCHITECTURES = {"deltanet": ("qwen35", "qwen35moe"), "convolution": ("lfm2", "lfm2moe")}
ONE_PART = ("nemotron_h", "nemotron_h_moe")
"""Architectures whose layers in a file are a mixer or a feed-forward."""

DECAY, TIME_BIAS = -1.0, -3.0  # a memory lasts some twenty tokens


class OfMixer(NamedTuple):
    """A tensor of a recurrent layer.

    rows: 0: a vector
    is_plain: the tensor is F32 in every preset
    constant: the value of all elements; None: random ones
    """

    name: str
    rows: int
    columns: int
    is_plain: bool = False
    constant: float | None = None


def recurrent_architecture(model: ModelSpec) -> str | None:
    """Return llama.cpp's name for the architecture of a shape with recurrent layers; None if it has none."""
    is_mixture = model.experts > 1
    if "mamba2" in model.mixers and not model.gated:
        return ONE_PART[is_mixture]
    return next((names[is_mixture] for mixer, names in ARCHITECTURES.items() if mixer in model.mixers), None)


def recurrent_tensors(model: ModelSpec, layer: int) -> Iterator[OfMixer]:
    """Yield the tensors of a recurrent layer, without its norm."""
    width, channels, heads, values = model.width, model.channels(layer), model.state_heads, model.state_values_width
    if model.mixers[layer] == "convolution":
        yield OfMixer("shortconv.in_proj.weight", model.recurrent_rows(layer), width)
        yield OfMixer("shortconv.conv.weight", channels, model.convolution_tokens, is_plain=True)
        yield OfMixer("shortconv.out_proj.weight", width, width)
        return
    is_mamba = model.mixers[layer] == "mamba2"
    if is_mamba:
        yield OfMixer("ssm_in.weight", model.recurrent_rows(layer) + heads, width)
    else:
        yield OfMixer("attn_qkv.weight", channels, width)
        yield OfMixer("attn_gate.weight", values, width)
        yield OfMixer("ssm_alpha.weight", heads, width)
        yield OfMixer("ssm_beta.weight", heads, width)
    yield OfMixer("ssm_conv1d.weight", channels, model.convolution_tokens, is_plain=True)
    if model.convolution_bias:
        yield OfMixer("ssm_conv1d.bias", 0, channels, is_plain=True, constant=0.0)
    of_heads = (heads, 1) if is_mamba else (0, heads)
    yield OfMixer("ssm_a", *of_heads, is_plain=True, constant=DECAY)
    yield OfMixer("ssm_dt.bias", 0, heads, is_plain=True, constant=TIME_BIAS)
    if is_mamba:
        yield OfMixer("ssm_d", heads, 1, is_plain=True, constant=1.0)
    groups = model.state_norm_groups
    normed = (groups, values // groups) if is_mamba else (0, model.state_value_width)
    yield OfMixer("ssm_norm.weight", *normed, is_plain=True, constant=1.0)
    yield OfMixer("ssm_out.weight", width, values)


def recurrent_keys(model: ModelSpec) -> dict[str, Any]:
    """Return the keys that describe recurrent layers, after the architecture's name; nothing if there are none."""
    name = recurrent_architecture(model)
    if name is None:
        return {}
    if "convolution" in model.mixers:
        return {"shortconv.l_cache": model.convolution_tokens, "attention.head_count_kv": _key_heads(model, name)}
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
