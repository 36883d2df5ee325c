"""Misses of the services' cache for a package under its plan, cluster by cluster.

Each part has the slots, the reserve of free slots, the pinned clusters and the warm-up of the plan, and the cache's own
rule evicts. Read windows are not simulated, as in caching.py. That is right in predicted mode, in
which the cache evicts before a layer's window opens. In exact mode it evicts for value parts later, and the simulation
has a fifth too few misses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from neuronpipe.native import ffi, lib
from neuronpipe.plans.activity.eviction_rule import EvictionRule, whole_experts_by_part
from neuronpipe.plans.activity.replacement_policies import Ids
from neuronpipe.plans.lab.simulate.caching import Traffic
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Plan, reads_whole
from neuronpipe.plans.plan.pinned_clusters import warm_counts
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.memory.residency import TRIGGER, VALUE

Step = Sequence[Ids]
"""The clusters that each layer accesses, numbered over all layers."""


@frozen
class SequenceDemand:
    """The clusters that a sequence accesses.

    tokens: clusters of each generated token
    prompt: clusters of all prompt tokens together, in one step; None: without a prompt
    """

    tokens: Sequence[Step]
    prompt: Step | None = None


class Region:
    """The slots and residency entries of trigger or value parts."""

    def __init__(
        self, clusters: int, *, slots: int, reserve: int, pinned: Sequence[int], experts_of_token: int = 0
    ) -> None:
        """Create a region whose pinned and warm clusters are resident.

        clusters: number of clusters of a feed-forward
        reserve: number of slots that are kept free
        pinned: for each feed-forward, the number of first clusters that are pinned
        experts_of_token: number of whole experts that a token uses, as for EvictionRule
        """
        self._words = np.zeros(len(pinned) * clusters, dtype=np.uint32)
        numbers = np.arange(clusters)
        warm = numbers < np.array(warm_counts(pinned, clusters, slots - reserve))[:, None]
        self._words[warm.reshape(-1)] = lib.NP_ENTRY_PRESENT
        self._words[(numbers < np.array(pinned)[:, None]).reshape(-1)] |= np.uint32(lib.NP_ENTRY_PINNED)
        self._reserve = 0 if slots >= len(self._words) else reserve
        self._free = slots - int(np.count_nonzero(self._words))
        self._pointer: Any = ffi.from_buffer("uint32_t[]", self._words)
        self._rule = EvictionRule(len(self._words), experts_of_token, clusters)

    def step(self, ids: Ids) -> int:
        """Access clusters of a layer, load the absent ones, and return the number of misses."""
        present = self._words[ids] & lib.NP_ENTRY_STATE_MASK == lib.NP_ENTRY_PRESENT
        self._words[ids[present]] |= np.uint32(lib.NP_ENTRY_REFERENCED)
        missing_ids = ids[~present]
        loaded = 0
        while loaded < len(missing_ids):  # several times if a layer wants more clusters than slots can be freed
            self._evict(len(missing_ids) - loaded - self._free)
            if not self._free:
                break  # all resident clusters are pinned or wanted by this layer
            group = missing_ids[loaded : loaded + self._free]
            self._free -= len(group)
            self._words[group] = lib.NP_ENTRY_LOADING
            self._evict(self._reserve - self._free)
            self._words[group] = lib.NP_ENTRY_PRESENT | lib.NP_ENTRY_REFERENCED
            loaded += len(group)
        return len(missing_ids)

    def _evict(self, count: int) -> None:
        if count > 0:
            self._free += len(self._rule.take(self._pointer, count))


def planned_traffic(
    manifest: Manifest,
    plan: Plan,
    sequences: Sequence[SequenceDemand],
    skipped_sequences: int,
    sampled: int | None = None,
    *,
    batch: int = 1,
) -> Traffic:
    """Return the lookups and misses of clusters in all sequences except the first skipped_sequences.

    A token looks up the predicted clusters in predicted mode, where all of them count as firing; otherwise all
    triggers, and the values of clusters that fire. Misses are counted as in `bench`.

    sampled: number of clusters of a feed-forward in the sequences; None: all of the package's
    batch: sequences of each step
    """
    model, memory, flash = manifest.model, plan.memory, plan.flash
    clusters = sampled or manifest.layout.clusters
    scale = manifest.layout.clusters / clusters

    def region(slots: int, reserve: int, pinned: Sequence[int], experts: int) -> Region:
        # Cumulative rounding, so that the pinned clusters of all feed-forwards keep their share of the slots.
        counts = np.diff(np.round(np.cumsum(pinned) / scale), prepend=0).astype(int).tolist()
        return Region(
            clusters,
            slots=round(slots / scale),
            reserve=round(reserve / scale),
            pinned=counts,
            experts_of_token=experts,
        )

    pinned_triggers, pinned_values = memory.pins_for(batch).counts(model.ffns)
    predicted, whole = plan.compute.mode == "predicted", reads_whole(plan.compute, flash)
    experts = whole_experts_by_part(manifest, plan.compute.mode, reads_whole=whole)
    triggers = region(memory.trigger_slots, flash.reserved_triggers, pinned_triggers, experts[TRIGGER])
    values = region(memory.value_slots, flash.reserved_values, pinned_values, experts[VALUE])
    counts: list[list[tuple[int, ...]]] = []

    def step(layers: Step) -> list[tuple[int, ...]]:
        rows: list[tuple[int, ...]] = []
        for fires in layers:
            looked = fires if predicted else _all_of_their_experts(fires, clusters)
            missed, missed_values = triggers.step(looked), values.step(looked if flash.bundle else fires)
            wanted_counts = (missed, len(looked)) if whole else (missed + missed_values, len(looked) + len(fires))
            rows.append((len(looked), len(fires), missed, missed_values, *wanted_counts))
        return rows

    for number, sequence in enumerate(sequences):
        if sequence.prompt is not None:
            step(sequence.prompt)
        rows = [step(token) for token in sequence.tokens]
        counts += rows if number >= skipped_sequences else []
    looked, fire, missed, missed_values, wanted_missed, wanted_count = scale * np.moveaxis(
        np.array(counts, dtype=float), 2, 0
    )
    return Traffic(
        hot_share=0.0,
        streamed_share=0.0,
        looked=looked,
        fire=fire,
        trigger_misses=missed,
        value_misses=missed_values,
        fire_misses=wanted_missed,
        all_fire=wanted_count,
    )


def _all_of_their_experts(fires: Ids, clusters: int) -> Ids:
    """Return all clusters of the feed-forwards that have a firing cluster."""
    first = np.unique(fires // clusters) * clusters
    return (first[:, None] + np.arange(clusters)).reshape(-1)
