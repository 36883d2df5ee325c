"""The description of multi-head latent attention in a GGUF file: its keys, and the names of its tensors.

Under `key_length` llama.cpp's converter writes the width of latent and rotated key together, and that of a query under
`key_length_mla`. Older files have the latter under `key_length`, and one matrix for keys and values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from neuronpipe.plans.convert.stored_tensors import Inventory
from neuronpipe.plans.models.family import TensorNames
from neuronpipe.plans.models.spec import MAX
from neuronpipe.plans.strict_json import Record

JOINT = "attn_kv_b"


def gguf_latents(metadata: Record, name: str) -> dict[str, Any]:
    """Return the fields of ModelSpec that describe attention with latents. Raises UserError for missing keys.

    name: value of `general.architecture`
    """

    def integer(key: str, maximum: int, other: str = "") -> int:
        field = f"{name}.{key}"
        return metadata.integer(field if metadata.has(field) or not other else f"{name}.{other}", 1, maximum)

    has_rank = metadata.has(f"{name}.attention.q_lora_rank")
    return {
        "key_heads": 1,
        "head_width": integer("attention.key_length_mla", MAX.head_width, "attention.key_length"),
        "value_width": integer("attention.value_length_mla", MAX.head_width, "attention.value_length"),
        "latent_width": integer("attention.kv_lora_rank", MAX.width),
        "rotary_width": integer("rope.dimension_count", MAX.head_width),
        "query_rank": integer("attention.q_lora_rank", MAX.width) if has_rank else 0,
    }


def latent_names(names: TensorNames, inventory: Inventory, *, query_rank: int, block: int = 0) -> TensorNames:
    """Return the names of tensors in a model with latents. block: the number of a layer that has them, in the file"""
    names = replace(names, latent_down="attn_kv_a_mqa", latent_norm="attn_kv_a_norm")
    if query_rank:
        names = replace(names, query="attn_q_b", query_down="attn_q_a", query_down_norm="attn_q_a_norm")
    if inventory.has(f"blk.{block}.{JOINT}.weight"):
        return replace(names, latent_up=JOINT)
    return replace(names, turned_key_up="attn_k_b", value_up="attn_v_b")


def latent_scaling(metadata: Record, name: str) -> dict[str, Any]:
    """Return YaRN's factors by the names of config.json. llama.cpp scales scores by `yarn_log_multiplier`, and rotated
    elements not at all."""
    field = f"{name}.rope.scaling.yarn_log_multiplier"
    multiplier = metadata.number(field, 0.0, 10.0) if metadata.has(field) else 0.0
    return {"attention_factor": 1.0, **({"mscale_all_dim": 10 * multiplier} if multiplier else {})}
