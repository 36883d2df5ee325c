"""The cache's bookkeeping, without sockets: which slots are free, what to grant, what to warm up first.

a slot is    free (here)  ->  granted (the loader's)  ->  holds a cluster (named by a present word)  ->  free ...
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal

MAX_IDS_PER_MESSAGE: Final = 1 << 20  # 4 MiB packed; a frame holds 16


def packed(ids: array[int]) -> Iterator[bytes]:
    """Word or slot numbers as little-endian uint32, in pieces that fit a message each; none for none."""
    for start in range(0, len(ids), MAX_IDS_PER_MESSAGE):
        yield ids[start : start + MAX_IDS_PER_MESSAGE].tobytes()


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
        room = self.slots - self.reserve - layers * pinned
        return min(self.clusters_per_layer, pinned + max(0, room) // layers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmUp:
    """Clusters to load when nothing more urgent waits. parts: 1 triggers, 2 values, 3 both."""

    parts: Literal[1, 2, 3]
    clusters: array[int]
    pinned: bool


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
                clusters = array("I", (first + n for first in layers for n in wanted))
                yield WarmUp(parts=parts, clusters=clusters, pinned=keep)


class FreeSlots:
    """The free slots of one region, and how many the loader was granted. Four bytes per slot, five during a
    restart: a large model has millions."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self._free = array("I")  # descending: the lowest are taken first, from the end
        self._granted = 0  # since the reset

    def restart(self, used: Iterable[int]) -> None:
        """After a reset: every slot that no present word names is free."""
        taken = bytearray(self.region.slots)
        for slot in used:
            taken[slot] = 1
        self._free = array("I", (slot for slot in reversed(range(self.region.slots)) if not taken[slot]))
        self._granted = 0

    def take(self, count: int) -> array[int]:
        """Up to `count` free slots, for warming up."""
        left = max(0, len(self._free) - count)
        taken = self._free[left:]
        taken.reverse()
        del self._free[left:]
        self._granted += len(taken)
        return taken

    def grant(self, free: int, waiting: int, received: int, evict: Callable[[int], array[int]]) -> array[int]:
        """Slots to hand to the loader, so that it has its reserve and one for each waiting cluster.

        free, waiting, received: as the loader last said; what was granted and not received yet counts as free. Our
        own free slots go first; then `evict(n)` gives up to n more.
        """
        if self.region.holds_everything:
            return self.take(len(self._free))
        want = max(0, self.region.reserve + waiting - free - (self._granted - received))
        granted = self.take(want)
        if len(granted) < want:
            evicted = evict(want - len(granted))
            self._granted += len(evicted)
            granted += evicted
        return granted
