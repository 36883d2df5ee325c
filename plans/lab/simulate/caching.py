"""Lookups and misses of a system's cache on a workload, by token and layer."""

from __future__ import annotations

import numpy as np
from neuronpipe.plans.activity.replacement_policies import Lru
from neuronpipe.plans.lab.simulate.systems import System
from neuronpipe.plans.lab.simulate.workload import LayerDemand, Workload
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

Counts = NDArray[np.float64]


@frozen
class Traffic:
    """Numbers of neurons (or clusters) by token and layer. Counts are [tokens, layers].

    hot_share: share of a feed-forward that is computed densely
    streamed_share: share of a feed-forward that is hot and read for every token
    looked: cold (not hot) neurons that are looked up
    fire: looked up cold neurons that fire
    trigger_misses, value_misses: trigger and value parts to read
    fire_misses: firing neurons that are not resident
    all_fire: firing neurons, hot ones included
    """

    hot_share: float
    streamed_share: float
    looked: Counts
    fire: Counts
    trigger_misses: Counts
    value_misses: Counts
    fire_misses: Counts
    all_fire: Counts

    @property
    def miss_rate(self) -> float:
        """Share of firing neurons that are not resident."""
        return float(self.fire_misses.sum() / max(1.0, self.all_fire.sum()))

    @property
    def looked_miss_rate(self) -> float:
        """Share of lookups of trigger parts that miss, false positives of the predictor included."""
        return float(self.trigger_misses.sum() / max(1.0, self.looked.sum()))

    def miss_rates(self) -> Counts:
        rates: Counts = self.fire_misses.sum(axis=1) / np.maximum(1.0, self.all_fire.sum(axis=1))
        return rates


def traffic(
    workload: Workload,
    system: System,
    resident: float,
    batch: int,
    skipped_tokens: int,
    *,
    stream_from: float = 1.0,
) -> Traffic:
    """Return the lookups and misses of a workload, without its first skipped_tokens.

    resident: share of all neurons that memory holds, hot ones included
    stream_from: neurons that at least this share of the tokens wants are read sequentially for every token, if the
        cache is too small for the cold neurons of a token
    """
    pinned_share = hot_share = system.hot_share(resident, batch)
    if hot_share and resident < 1 and _cold_demand_share(workload, _hot(workload, hot_share)) > resident - hot_share:
        # A token wants more cold neurons than there are slots: LRU would evict each before its next use.
        pinned_share = min(resident, system.hot_share(1.0, batch))
        hot_share = max(pinned_share, float((workload.frequency >= stream_from).mean()))
    hot = _hot(workload, hot_share)
    cache = _cache(workload, system, resident, hot)
    layers = len(workload.tokens[0])
    counts = np.zeros((6, len(workload.tokens), layers))
    for n, token in enumerate(workload.tokens):
        for layer, demand in enumerate(token):
            cold = ~hot[demand.looked]
            looked, fires = demand.looked[cold], demand.fires[cold]
            counts[:, n, layer] = (
                len(looked),
                fires.sum(),
                *cache.look(LayerDemand(looked, fires)),
                demand.fires.sum(),
            )
    counted = counts[:, skipped_tokens:] * workload.scale
    return Traffic(hot_share, hot_share - pinned_share, *counted)


def _cold_demand_share(workload: Workload, hot: NDArray[np.bool_]) -> float:
    """Return the mean share of all neurons that a token looks up and that are not hot."""
    cold = sum(int((~hot[layer.looked]).sum()) for token in workload.tokens for layer in token)
    return cold / len(workload.tokens) / len(workload.order)


def _hot(workload: Workload, share: float) -> NDArray[np.bool_]:
    hot = np.zeros(len(workload.order), dtype=bool)
    hot[workload.order[: round(share * len(workload.order))]] = True
    return hot


class _Nothing:
    """A cache in which every lookup misses. `look` returns (trigger misses, value misses, firing misses)."""

    def look(self, demand: LayerDemand) -> tuple[int, int, int]:
        fires = int(demand.fires.sum())
        return len(demand.looked), fires, fires


class _Everything(_Nothing):
    def look(self, demand: LayerDemand) -> tuple[int, int, int]:
        return 0, 0, 0


class _Neurons(_Nothing):
    """A cache of neurons by LRU. The value part of a neuron is read only when it fires."""

    def __init__(self, policy: Lru, count: int) -> None:
        self._policy = policy
        self._whole = np.ones(count, dtype=bool)

    def look(self, demand: LayerDemand) -> tuple[int, int, int]:
        ids, fires = demand.looked, demand.fires
        missing = ~self._policy.resident[ids]
        values = fires & (missing | ~self._whole[ids])
        self._policy.step(ids)
        self._whole[ids[missing]] = False
        self._whole[ids[fires]] = True
        return int(missing.sum()), int(values.sum()), int((fires & missing).sum())


def _cache(workload: Workload, system: System, resident: float, hot: NDArray[np.bool_]) -> _Nothing:
    order = workload.order
    if resident >= 1:
        return _Everything()
    if system.cache == "none":
        return _Nothing()
    slots = max(0, int(resident * len(order)) - int(hot.sum()))
    if slots == 0:
        return _Nothing()
    cold_first = np.concatenate((order[~hot[order]], order[hot[order]]))
    return _Neurons(Lru(cold_first, slots), len(order))
