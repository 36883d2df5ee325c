"""What the services' cache misses of a package under its plan, cluster by cluster.

Each part has its slots, its reserve of free ones and its pinned clusters, and is warmed up, as the plan says; which one
goes is decided by native/residency/clock.c. Read windows are left out, as in caching.py: what is asked for ahead of
computing is evicted for before its layer's window opens. Value parts that wait for their gate are evicted for within it
or later; README.md has what that is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from neuronpipe.native import ffi, lib
from neuronpipe.plans.activity.replacement_policies import Ids
from neuronpipe.plans.lab.simulate.caching import Traffic
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Plan, reads_whole
from neuronpipe.plans.plan.pinned_clusters import warm_counts
from neuronpipe.protocol.frozen import frozen

Step = Sequence[Ids]
"""Of each layer the clusters that are wanted, numbered over all layers."""


@frozen
class Text:
    """prompt: what all of its tokens want together, in one step; None: there is none. tokens: of each one."""

    tokens: Sequence[Step]
    prompt: Step | None = None


class Region:
    """One part's slots and residency entries."""

    def __init__(self, clusters: int, *, slots: int, reserve: int, pinned: Sequence[int]) -> None:
        """clusters: of a feed-forward. pinned: of each, how many of its first ones."""
        self._words = np.zeros(len(pinned) * clusters, dtype=np.uint32)
        numbers = np.arange(clusters)
        warm = numbers < np.array(warm_counts(pinned, clusters, slots - reserve))[:, None]
        self._words[warm.reshape(-1)] = lib.NP_ENTRY_PRESENT
        self._words[(numbers < np.array(pinned)[:, None]).reshape(-1)] |= np.uint32(lib.NP_ENTRY_PINNED)
        self._reserve = 0 if slots >= len(self._words) else reserve
        self._free = slots - int(np.count_nonzero(self._words))
        self._pointer: Any = ffi.from_buffer("uint32_t[]", self._words)
        self._hand: Any = ffi.new("size_t *", 0)

    def step(self, wanted: Ids) -> int:
        """Look these clusters of a layer up, and bring those that are not there. Returns how many these were."""
        present = self._words[wanted] & lib.NP_ENTRY_STATE_MASK == lib.NP_ENTRY_PRESENT
        self._words[wanted[present]] |= np.uint32(lib.NP_ENTRY_REFERENCED)
        missing = wanted[~present]
        brought = 0
        while brought < len(missing):  # a few at a time, where memory holds less than a layer wants
            self._evict(len(missing) - brought - self._free)
            if not self._free:
                break  # all that is there is pinned, or wanted at this moment
            some = missing[brought : brought + self._free]
            self._free -= len(some)
            self._words[some] = lib.NP_ENTRY_LOADING
            self._evict(self._reserve - self._free)
            self._words[some] = lib.NP_ENTRY_PRESENT | lib.NP_ENTRY_REFERENCED
            brought += len(some)
        return len(missing)

    def _evict(self, count: int) -> None:
        if count > 0:
            slots: Any = ffi.new("uint32_t[]", count)
            self._free += lib.np_clock_take(self._pointer, len(self._words), self._hand, ffi.NULL, 0, count, slots)


def planned_traffic(
    manifest: Manifest, plan: Plan, texts: Sequence[Text], skipped_texts: int, sampled: int | None = None
) -> Traffic:
    """Of the tokens of all texts but the first ones. Its units are clusters, and its misses those that `bench` counts:
    of the parts that a token looks up. sampled: the texts have so many clusters of each feed-forward (default: all).

    What a text wants is what its mode looks for: in predicted mode clusters that the predictor names, which are taken
    to fire; else those that fire, beside all triggers.
    """
    model, memory, flash = manifest.model, plan.memory, plan.flash
    clusters = sampled or manifest.layout.clusters
    scale = manifest.layout.clusters / clusters

    def region(slots: int, reserve: int, pinned: Sequence[int]) -> Region:
        counts = [round(count / scale) for count in pinned]
        return Region(clusters, slots=round(slots / scale), reserve=round(reserve / scale), pinned=counts)

    pinned_triggers, pinned_values = memory.pins_for(1).counts(model.ffns)
    triggers = region(memory.trigger_slots, flash.reserved_triggers, pinned_triggers)
    values = region(memory.value_slots, flash.reserved_values, pinned_values)
    predicted, whole = plan.compute.mode == "predicted", reads_whole(plan.compute, flash)
    counts: list[list[tuple[int, ...]]] = []

    def step(wanted: Step) -> list[tuple[int, ...]]:
        rows: list[tuple[int, ...]] = []
        for fires in wanted:
            looked = fires if predicted else _all_of_their_experts(fires, clusters)
            missed, missed_values = triggers.step(looked), values.step(looked if flash.bundle else fires)
            both = (missed, len(looked)) if whole else (missed + missed_values, len(looked) + len(fires))
            rows.append((len(looked), len(fires), missed, missed_values, *both))
        return rows

    for number, text in enumerate(texts):
        if text.prompt is not None:
            step(text.prompt)
        rows = [step(token) for token in text.tokens]
        counts += rows if number >= skipped_texts else []
    looked, fire, missed, missed_values, wanted_missed, wanted = scale * np.moveaxis(
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
        all_fire=wanted,
    )


def _all_of_their_experts(fires: Ids, clusters: int) -> Ids:
    """All clusters of the feed-forwards of which any fires."""
    first = np.unique(fires // clusters) * clusters
    return (first[:, None] + np.arange(clusters)).reshape(-1)
