"""The cache's bookkeeping, without sockets: which slots are free, what to grant, what to warm up first.

a slot is    free (here)  ->  granted (the loader's)  ->  holds a cluster (named by a present word)  ->  free ...
"""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal

MAX_IDS_PER_MESSAGE: Final = 1 << 17  # half a MiB packed: few at a time need be held


def packed(ids: Iterable[int]) -> Iterator[bytes]:
    """Cluster or slot numbers as little-endian uint32, in pieces that fit a message each; none for none. Each piece is
    made when it is asked for."""
    left = iter(ids)
    while piece := array("I", itertools.islice(left, MAX_IDS_PER_MESSAGE)):
        yield piece.tobytes()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Region:
    """One part's slots, from the plan. `reserve`: free slots that the loader should have ahead of need."""

    part: Literal[0, 1]
    slots: int
    reserve: int
    clusters: int
    clusters_per_layer: int
    pinned_per_layer: int

    @property
    def holds_everything(self) -> bool:
        """Whether nothing is ever evicted."""
        return self.slots >= self.clusters

    @property
    def warm_per_layer(self) -> int:
        """Clusters of each layer worth loading before anybody asks, the pinned ones among them: the first, where the
        converter puts the hottest."""
        layers = self.clusters // self.clusters_per_layer
        pinned = min(self.pinned_per_layer, self.clusters_per_layer)
        unpinned_slots = self.slots - self.reserve - layers * pinned
        return min(self.clusters_per_layer, pinned + max(0, unpinned_slots) // layers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmUp:
    """Clusters to load when nothing more urgent waits: the same ones of every layer. parts: 1 triggers, 2 values, 3
    both; layers: the first cluster of each."""

    parts: Literal[1, 2, 3]
    layers: range
    wanted: range
    pinned: bool

    def __len__(self) -> int:
        """How many clusters these are."""
        return len(self.layers) * len(self.wanted)

    def __iter__(self) -> Iterator[int]:
        """The clusters."""
        return (first + n for first in self.layers for n in self.wanted)


def warm_ups(triggers: Region, values: Region) -> Iterator[WarmUp]:
    """What to load at the start, pinned clusters first. Clusters of which both parts are wanted are asked for together:
    their bytes are neighbours, and the file is read from end to end once."""
    pinned = [min(one.pinned_per_layer, one.clusters_per_layer) for one in (triggers, values)]
    warm = [triggers.warm_per_layer, values.warm_per_layer]
    for starts, ends, keep in (((0, 0), pinned, True), (pinned, warm, False)):
        both = max(starts), min(ends)
        ranges: tuple[tuple[Literal[1, 2, 3], range], ...] = (
            (3, range(*both)),
            (1, range(starts[0], min(ends[0], both[0]))),
            (1, range(max(starts[0], both[1]), ends[0])),
            (2, range(starts[1], min(ends[1], both[0]))),
            (2, range(max(starts[1], both[1]), ends[1])),
        )
        for parts, wanted in ranges:
            if wanted:
                layers = range(0, triggers.clusters, triggers.clusters_per_layer)
                yield WarmUp(parts=parts, layers=layers, wanted=wanted, pinned=keep)


class FreeSlots:
    """The free slots of one region, and how many the loader was granted. A byte per slot: a large model has
    millions."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self._free = bytearray()  # 1: free
        self._next = 0  # no slot below is free: what is taken comes back only with a reset
        self._left = 0  # free slots
        self._granted = 0  # since the reset

    def restart(self, used: Iterable[int]) -> None:
        """After a reset: every slot that no present word names is free."""
        self._free = bytearray(b"\1") * self.region.slots
        for slot in used:
            self._free[slot] = 0
        self._next, self._left, self._granted = 0, self._free.count(1), 0

    def take(self, count: int) -> Iterator[int]:
        """Up to `count` free slots, the lowest first, for warming up. They count as granted at once; go through them
        before anything else is asked of this region."""
        count = min(count, self._left)
        self._left -= count
        self._granted += count
        return self._lowest(count)

    def _lowest(self, count: int) -> Iterator[int]:
        while count:
            first = self._free.index(1, self._next)
            end = self._free.find(0, first, first + count)
            self._next = end if end >= 0 else first + count
            count -= self._next - first
            yield from range(first, self._next)

    def grant(self, free: int, waiting: int, received: int, evict: Callable[[int], array[int]]) -> Iterable[int]:
        """Slots to hand to the loader, so that it has its reserve and one for each waiting cluster.

        free, waiting, received: as the loader last said; what was granted and not received yet counts as free. Our
        own free slots go first; then `evict(n)` gives up to n more.
        """
        if self.region.holds_everything:
            return self.take(self._left)
        want = max(0, self.region.reserve + waiting - free - (self._granted - received))
        granted = array("I", self.take(want))
        if len(granted) < want:
            evicted = evict(want - len(granted))
            self._granted += len(evicted)
            granted += evicted
        return granted
