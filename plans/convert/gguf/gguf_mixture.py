"""The description of a mixture in a GGUF file: its keys, and what the tensors that exist say of each layer."""

from __future__ import annotations

from typing import Any

from neuronpipe.plans.convert.gguf.gguf_header import uniform_integer
from neuronpipe.plans.convert.stored_tensors import Inventory
from neuronpipe.plans.models.family import GgufArchitecture
from neuronpipe.plans.models.spec import MAX, MAX_SCALE, MIN_SCALE, Router
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.frozen import frozen

GATING: dict[int, Router] = {1: "softmax", 2: "sigmoid", 3: "softmax"}  # llama_expert_gating_func_type
SOFTMAX_OF_CHOSEN = 3
SHARED, DENSE = "blk.{}.ffn_up_shexp.weight", "blk.{}.ffn_up.weight"


@frozen
class GgufMixture:
    """A mixture in a GGUF file.

    fields: fields of ModelSpec
    routed_layer: number of the first layer with a router
    dense_experts: the field of LayerKind, of each layer
    """

    fields: dict[str, Any]
    routed_layer: int
    dense_experts: list[int]


def gguf_mixture(
    metadata: Record, name: str, architecture: GgufArchitecture, inventory: Inventory, layers: int, experts: int
) -> GgufMixture:
    """Return the mixture that a file describes. Raises UserError, which names file and key, for what is not supported.

    name: value of `general.architecture`
    experts: value of `expert_count`
    """

    def has(key: str) -> bool:
        return metadata.has(f"{name}.{key}")

    def integer(key: str, minimum: int, maximum: int, default: int) -> int:
        return metadata.integer(f"{name}.{key}", minimum, maximum) if has(key) else default

    routers = [inventory.has(f"blk.{layer}.ffn_gate_inp.weight") for layer in range(layers)]
    experts_per_token = uniform_integer(metadata, f"{name}.expert_used_count", 1, experts)
    if not any(routers):
        metadata.fail(f"{name}.expert_count", f"is {experts}, but no layer has a router, `ffn_gate_inp.weight`")
    routed_layer = routers.index(True)
    neurons_key = "expert_feed_forward_length" if has("expert_feed_forward_length") else "feed_forward_length"
    neurons = uniform_integer(metadata, f"{name}.{neurons_key}", 1, MAX.neurons)
    gating = integer("expert_gating_func", 0, 99, 0)
    if gating and gating not in GATING:
        metadata.fail(f"{name}.expert_gating_func", f"{gating} is not supported; 1 and 3 (softmax) and 2 (sigmoid) are")
    choosing_bias = inventory.has(f"blk.{routed_layer}.exp_probs_b.bias")
    # Only sigmoids have such biases beside latents: files without the key are of checkpoints that do not state it.
    router: Router = "sigmoid" if architecture.latents and choosing_bias else architecture.router
    router = GATING.get(gating, router)
    if router == "sparsemixer" and experts_per_token != 2:
        metadata.fail(f"{name}.expert_used_count", f"is {experts_per_token}; sparsemixer chooses 2 experts")
    normalized = architecture.normalized_shares
    if has("expert_weights_norm"):
        normalized = metadata.boolean(f"{name}.expert_weights_norm")
    beside = DENSE if architecture.gemma4_layers else SHARED
    shared_experts = _parts(inventory, beside.format(routed_layer), neurons)
    if integer("expert_shared_count", 0, MAX.experts, 0) and not shared_experts:
        metadata.fail(f"{name}.expert_shared_count", f"is not 0, but `{SHARED.format(routed_layer)}` is missing")
    groups = integer("expert_group_count", 1, experts, 1)
    if experts % groups:
        metadata.fail(f"{name}.expert_group_count", f"{groups} groups of {experts} experts")
    scale_key = "expert_weights_scale"
    scale = metadata.number(f"{name}.{scale_key}", 0.0, MAX_SCALE) if has(scale_key) else 0.0
    return GgufMixture(
        {
            "experts": experts,
            "experts_per_token": experts_per_token,
            "neurons": neurons,
            "router": router,
            "router_jitter": 0.0 if gating else architecture.router_jitter,
            "router_reads": architecture.router_reads,
            "normalized_shares": normalized or gating == SOFTMAX_OF_CHOSEN,
            "choosing_bias": choosing_bias,
            "router_groups": groups,
            "groups_by_best": groups > 1 and architecture.latents and router == "softmax" and gating in (0, 1),
            "groups_per_token": integer("expert_group_used_count", 1, groups, groups),
            "routed_scale": max(scale, MIN_SCALE) if scale else 1.0,
            "shared_experts": shared_experts,
            "shared_gate": inventory.has(f"blk.{routed_layer}.ffn_gate_inp_shexp.weight"),
            "ffn_bias": inventory.has(f"blk.{routed_layer}.ffn_up_exps.bias"),
            "router_bias": inventory.has(f"blk.{routed_layer}.ffn_gate_inp.bias"),
        },
        routed_layer,
        [0 if routers[layer] else _parts(inventory, DENSE.format(layer), neurons) or 1 for layer in range(layers)],
    )


def _parts(inventory: Inventory, name: str, neurons: int) -> int:
    """Return how many experts of `neurons` neurons a feed-forward is as wide as; 0 if there is no such tensor."""
    return -(-inventory.shape(name)[0] // neurons) if inventory.has(name) else 0
