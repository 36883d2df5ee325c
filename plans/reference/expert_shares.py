"""Computes which experts a router chooses for each token, and their shares."""

from __future__ import annotations

import numpy as np
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.reference.weights import Array


def expert_shares(model: ModelSpec, values: Array, choosing_bias: Array | None = None) -> Array:
    """Return each expert's share of each token, [tokens, experts]; 0 if it is not chosen.

    values: the router's, [tokens, experts]
    choosing_bias: [experts]; None: experts are chosen by their values alone
    """
    if model.router == "sparsemixer":
        return _sparsemixer_shares(model, values)
    if model.router == "softmax":
        raw = np.exp(values - values.max(axis=1, keepdims=True))
        scores = raw / raw.sum(axis=1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-values))
    ranks = scores if model.router_groups > 1 else values
    if choosing_bias is not None:
        ranks = scores + choosing_bias
    if model.router_groups > 1:
        of_groups = ranks.reshape(len(ranks), model.router_groups, -1)
        counted = 1 if model.groups_by_best else 2
        best = np.sort(of_groups, axis=2)[:, :, -counted:].sum(axis=2)
        left_out = np.argsort(-best, axis=1, kind="stable")[:, model.groups_per_token :]
        ranks = of_groups.copy()
        np.put_along_axis(ranks, left_out[:, :, None], np.float32(-np.inf), axis=1)
        ranks = ranks.reshape(values.shape)
    chosen = np.argsort(-ranks, axis=1, kind="stable")[:, : model.experts_per_token]
    best = np.take_along_axis(scores, chosen, axis=1)
    if model.normalized_shares:
        best = best / best.sum(axis=1, keepdims=True)
    shares = np.zeros_like(values)
    np.put_along_axis(shares, chosen, best * np.float32(model.routed_scale), axis=1)
    return shares


def _sparsemixer_shares(model: ModelSpec, values: Array) -> Array:
    shares, left = np.zeros_like(values), values.copy()
    for _ in range(model.experts_per_token):
        best = left.argmax(axis=1)[:, None]
        greatest = np.take_along_axis(left, best, axis=1)
        distance = (greatest - values) / np.maximum(np.abs(values), greatest)
        is_near = (distance <= np.float32(2 * model.router_jitter)) & np.isfinite(left)
        sums = np.where(is_near, np.exp(values - greatest), 0).sum(axis=1, keepdims=True, dtype=np.float32)
        np.put_along_axis(shares, best, 1 / sums, axis=1)
        np.put_along_axis(left, best, np.float32(-np.inf), axis=1)
    return shares * np.float32(model.routed_scale)
