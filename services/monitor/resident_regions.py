"""The resident part of the model, counted in the residency entries through a read-only mapping."""

from __future__ import annotations

from typing import Any

import numpy as np
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.layouts.weights import REQUEST_ENTRIES
from neuronpipe.protocol.memory.layout import LINE_WORDS
from neuronpipe.protocol.memory.residency import LOADING, PINNED, PRESENT, STATE_MASK
from neuronpipe.protocol.memory.segments import Closing
from neuronpipe.protocol.run_directory import RunFile, RunSummary

PARTS = ("trigger", "value")


@frozen
class Residency:
    """Counts of cluster parts in memory, as (triggers, values).

    slots: present number of slots
    pinned, cold: resident parts that may not and that may be evicted
    loading: parts that are being read
    by_layer: the share of each layer's parts that is resident, 0..1
    queued_requests: entries of the workers' rings that the loader has not read
    """

    slots: tuple[int, int]
    pinned: tuple[int, int]
    cold: tuple[int, int]
    loading: tuple[int, int]
    by_layer: tuple[float, ...]
    queued_requests: int


class Regions(Closing):
    """The residency segment of a run. `count` reads every entry, which takes a millisecond for a million."""

    def __init__(self, run_file: RunFile, summary: RunSummary) -> None:
        with run_file.open_segment("residency") as segment:
            self._mapping = segment.map()
        self._layers = summary.layers
        self._words: list[Any] = [np.frombuffer(self._mapping.view(f"{part}_entries"), np.uint32) for part in PARTS]
        self._slots = self._mapping.view("slots")
        self._tails, self._heads = (
            np.frombuffer(self._mapping.view(f"request_{name}"), np.uint32) for name in ("tails", "heads")
        )

    def count(self) -> Residency:
        pinned, cold, loading = [], [], []
        by_layer = np.zeros(self._layers)
        for shared in self._words:
            words = shared.copy()  # all counts must be of the same moment
            state = words & STATE_MASK
            present = state == PRESENT
            hot = int(np.count_nonzero(present & (words & PINNED != 0)))
            pinned.append(hot)
            cold.append(int(np.count_nonzero(present)) - hot)
            loading.append(int(np.count_nonzero(state == LOADING)))
            by_layer += present.reshape(self._layers, -1).mean(axis=1) / len(PARTS)
        waiting = (self._tails - self._heads)[::LINE_WORDS].astype(np.int64)
        return Residency(
            (self._slots[0], self._slots[1]),
            (pinned[0], pinned[1]),
            (cold[0], cold[1]),
            (loading[0], loading[1]),
            tuple(round(float(share), 4) for share in by_layer),
            int(waiting.clip(0, REQUEST_ENTRIES).sum()),
        )

    def close(self) -> None:
        del self._words, self._tails, self._heads, self._slots
        self._mapping.close()
