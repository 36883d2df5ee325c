"""The layers of Gemma 4 in a GGUF file, as llama.cpp's converter writes and its loader reads them.

Keys that end in `_swa` concern layers with windows, which `sliding_window_pattern` lists. A layer without a matrix of
values takes them from the products of keys. The feed-forward beside the experts has the names of a dense model's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NoReturn

from neuronpipe.plans.convert.stored_tensors import Inventory
from neuronpipe.plans.models.family import TensorNames
from neuronpipe.plans.models.spec import MAX, LayerKind, ModelSpec, SpecError, joined_runs
from neuronpipe.plans.strict_json import Record

UNSUPPORTED = {
    "embedding_length_per_layer_input": "embeddings of each layer",
    "attention.shared_kv_layers": "layers that share keys and values",
}


def with_gemma4_layers(metadata: Record, name: str, inventory: Inventory, model: ModelSpec) -> ModelSpec:
    """Return the model with the heads, windows, norms and scales of Gemma 4. Raises UserError for what is missing or
    not supported.

    name: general.architecture
    model: with the head width of layers without windows, and any number of key heads
    """
    for key, what in UNSUPPORTED.items():
        field = f"{name}.{key}"
        if metadata.has(field) and (number := metadata.integer(field, 0, MAX.width)):
            metadata.fail(field, f"is {number}: {what}, as E2B and E4B have them, are not supported")
    local_width = metadata.integer(f"{name}.attention.key_length_swa", 2, MAX.head_width)
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if metadata.has(f"{name}.{key}") and metadata.integer(f"{name}.{key}", 1, MAX.head_width) != local_width:
            metadata.fail(f"{name}.{key}", f"differs from the width of a head, {local_width}: not supported")
    key_heads = _of_layers(metadata, f"{name}.attention.head_count_kv", model.layers)
    has_window = [bool(item) for item in _of_layers(metadata, f"{name}.attention.sliding_window_pattern", model.layers)]
    window = metadata.integer(f"{name}.attention.sliding_window", 1, MAX.context_tokens)
    local_key_heads = next((heads for heads, is_local in zip(key_heads, has_window, strict=True) if is_local), 1)
    layers = [
        LayerKind(
            1,
            window if is_local else 0,
            local_positions=is_local,
            key_heads=heads if heads != local_key_heads else 0,
            head_width=0 if is_local or model.head_width == local_width else model.head_width,
            value_from_key=not any(inventory.has(f"blk.{number}.{name}.weight") for name in ("attn_v", "attn_qkv")),
        )
        for number, (heads, is_local) in enumerate(zip(key_heads, has_window, strict=True))
    ]
    is_mixture = model.experts > 1
    try:
        return replace(
            model,
            key_heads=local_key_heads,
            head_width=local_width,
            layer_kinds=joined_runs(layers),
            norms="both",
            value_norm=True,
            layer_scales=True,
            router_norm=is_mixture,
            expert_scales=is_mixture,
            branch_norms=is_mixture,
            attention_scale=math.sqrt(model.head_width),
            local_attention_scale=math.sqrt(local_width) if any(has_window) else 1.0,
        )
    except SpecError as error:
        metadata.fail(error.field, error.complaint)


def gemma4_names(names: TensorNames) -> TensorNames:
    """Return the names of the tensors."""
    return replace(
        names,
        scale="layer_output_scale.weight",
        shared="ffn_{}",
        routed_norm="pre_ffw_norm_2",
        routed_output_norm="post_ffw_norm_2",
        shared_output_norm="post_ffw_norm_1",
        router_norm="ffn_gate_inp.scale",
        expert_scales="ffn_down_exps.scale",
    )


def _of_layers(metadata: Record, field: str, layers: int) -> list[int]:
    """Return a value for each layer: those of a list, or one that holds for all; truth values or positive numbers."""

    def refuse() -> NoReturn:
        metadata.fail(field, f"expected one value, or a list with one for each of {layers} layers")

    value = metadata.value(field) if metadata.has(field) else refuse()
    values = value if isinstance(value, list) else [value] * layers
    plain = all(type(item) is bool or (type(item) is int and 1 <= item <= MAX.key_heads) for item in values)
    if len(values) != layers or not plain:
        refuse()
    return values
