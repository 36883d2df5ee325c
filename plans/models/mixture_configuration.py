"""Keys of config.json that classes of mixtures share: which layers have a router, how it chooses, what is always on.

The functions raise UserError for values that are not supported.
"""

from __future__ import annotations

from typing import NamedTuple

from neuronpipe.plans.models.spec import MAX, MAX_SCALE, MIN_SCALE, Router, RouterInput
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import quoted


class Mixture(NamedTuple):
    """The fields of a ModelSpec that describe a mixture."""

    experts: int
    experts_per_token: int
    router: Router = "softmax"
    router_reads: RouterInput = "feed_forward"
    router_norm: bool = False
    expert_scales: bool = False
    branch_norms: bool = False
    shared_experts: int = 0
    shared_gate: bool = False
    choosing_bias: bool = False
    normalized_shares: bool = True
    router_groups: int = 1
    groups_per_token: int = 1
    groups_by_best: bool = False
    routed_scale: float = 1.0


# Defaults of the classes whose routers are those of DeepSeek-V3.
DEEPSEEK_DEFAULTS = {
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": None,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
}


def deepseek_mixture(config: Record) -> Mixture:
    """Return the mixture of a class whose routers are those of DeepSeek-V3: sigmoids, a bias that only chooses, groups,
    and shared experts."""
    experts = config.integer("n_routed_experts", 2, MAX.experts)
    groups = config.integer("n_group", 1, experts)
    if experts % groups:
        config.fail("n_group", f"{groups} groups of {experts} experts")
    return Mixture(
        experts,
        config.integer("num_experts_per_tok", 1, experts),
        router="sigmoid",
        shared_experts=config.integer("n_shared_experts", 0, MAX.experts) if config.has("n_shared_experts") else 0,
        choosing_bias=True,
        normalized_shares=config.boolean("norm_topk_prob"),
        router_groups=groups,
        groups_per_token=config.integer("topk_group", 1, groups),
        routed_scale=config.number("routed_scaling_factor", MIN_SCALE, MAX_SCALE),
    )


def first_layers(config: Record, key: str = "first_k_dense_replace") -> list[bool]:
    """Return for each layer whether it has no router: as many of the first ones as `key` says."""
    layers = config.integer("num_hidden_layers", 1, MAX.layers)
    dense = config.integer(key, 0, layers - 1)
    return [layer < dense for layer in range(layers)]


def listed_layers(config: Record, default: list[bool], key: str = "mlp_layer_types") -> list[bool]:
    """Return for each layer whether it has no router, as `key` lists them. default: the result without a list"""
    layers = config.integer("num_hidden_layers", 1, MAX.layers)
    kinds = config.items(key) if config.has(key) else ["dense" if dense else "sparse" for dense in default]
    if len(kinds) != layers or not all(kind in ("dense", "sparse") for kind in kinds) or "sparse" not in kinds:
        config.fail(key, f"{quoted(kinds)} is not dense or sparse for each of {layers} layers")
    return [kind == "dense" for kind in kinds]


def qwen_layers(config: Record) -> list[bool]:
    """Return for each layer of a Qwen mixture whether it has no router: those in `mlp_only_layers`, and all but every
    `decoder_sparse_step`-th one."""
    layers, step = config.integer("num_hidden_layers", 1, MAX.layers), config.integer("decoder_sparse_step", 1, 1 << 16)
    listed = config.items("mlp_only_layers") if config.has("mlp_only_layers") else []
    if not all(type(layer) is int and layer >= 0 for layer in listed):
        config.fail("mlp_only_layers", f"{quoted(listed)} is no list of layers")
    dense = [layer in listed or (layer + 1) % step != 0 for layer in range(layers)]
    if all(dense):
        config.fail("decoder_sparse_step", f"is {step}, so that no layer has experts")
    return dense


def dense_experts(config: Record, is_dense: list[bool], dense_neurons: str, expert_neurons: str) -> list[int]:
    """Return `dense_experts` of each layer: the feed-forward of a layer without router in parts as wide as an expert.

    dense_neurons, expert_neurons: the keys of the numbers of neurons
    """
    if not any(is_dense):
        return [0] * len(is_dense)
    wide, of_expert = (config.integer(key, 1, MAX.neurons) for key in (dense_neurons, expert_neurons))
    return [-(-wide // of_expert) if dense else 0 for dense in is_dense]
