"""Attention with latents in a GGUF counterpart: its tensors, and the keys that describe it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from neuronpipe.plans.lab.counterpart_weights import Tensor
from neuronpipe.plans.models.spec import ModelSpec

ARCHITECTURE = "deepseek2"


def latent_tensors(model: ModelSpec, place: str, usual: str) -> Iterator[Tensor]:
    """Yield the tensors of a layer's attention, without its norm and without attn_output.

    place: the beginning of their names
    usual: encoding of matrices
    """
    heads, width = model.query_heads, model.width
    yield Tensor(f"{place}.attn_kv_a_mqa.weight", model.cached_width, width, usual)
    yield Tensor(f"{place}.attn_kv_a_norm.weight", 0, model.latent_width, "F32")
    rows = heads * model.head_width
    if model.query_rank:
        yield Tensor(f"{place}.attn_q_a.weight", model.query_rank, width, usual)
        yield Tensor(f"{place}.attn_q_a_norm.weight", 0, model.query_rank, "F32")
        yield Tensor(f"{place}.attn_q_b.weight", rows, model.query_rank, usual)
    else:
        yield Tensor(f"{place}.attn_q.weight", rows, width, usual)
    yield Tensor(f"{place}.attn_k_b.weight", model.latent_width, model.unrotated_width, usual, stacked=heads)
    yield Tensor(f"{place}.attn_v_b.weight", model.value_width, model.latent_width, usual, stacked=heads)


def latent_keys(model: ModelSpec) -> dict[str, Any]:
    """Return the keys that describe attention with latents, after the architecture's name; nothing without any.

    llama.cpp's heads are those of the KV cache; the widths of a head of the model have names of their own.
    """
    if not model.latent_width:
        return {}
    return {
        "attention.key_length": model.cached_width,
        "attention.value_length": model.latent_width,
        "attention.key_length_mla": model.head_width,
        "attention.value_length_mla": model.value_width,
        "attention.kv_lora_rank": model.latent_width,
        **({"attention.q_lora_rank": model.query_rank} if model.query_rank else {}),
    }
