"""The cache's bookkeeping, without sockets: which slots are free, what to grant, what to warm up first.

a slot is    free (here)  ->  granted (the loader's)  ->  holds a cluster (named by a present word)  ->  free ...
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal

MOST_IDS_PER_MESSAGE: Final = 1 << 20  # 4 MiB packed; a frame holds 16


def packed(ids: array[int]) -> Iterator[bytes]:
    """Word or slot numbers as little-endian uint32, in pieces that fit a message each; none for none."""
    for start in range(0, len(ids), MOST_IDS_PER_MESSAGE):
        yield ids[start : start + MOST_IDS_PER_MESSAGE].tobytes()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Region:
    """One part's slots, from the plan. `stock`: free slots that the loader should have ahead of need."""

    part: Literal[0, 1]
    slots: int
    stock: int
    words: int
    clusters_per_layer: int
    pinned_per_layer: int

    @property
    def holds_everything(self) -> bool:
        """Whether nothing is ever evicted."""
        return self.slots >= self.words

    def pinned_words(self) -> array[int]:
        """Clusters that stay for good: the first of each layer, where the converter puts the hottest."""
        layers = self.words // self.clusters_per_layer
        first = range(min(self.pinned_per_layer, self.clusters_per_layer))
        return array("I", (layer * self.clusters_per_layer + n for layer in range(layers) for n in first))

    def warm_words(self) -> array[int]:
        """Clusters worth loading before anybody asks, beyond the pinned ones: the next of each layer, evenly."""
        layers = self.words // self.clusters_per_layer
        room = self.slots - self.stock - len(self.pinned_words())
        end = min(self.clusters_per_layer, self.pinned_per_layer + max(0, room) // layers)
        rest = range(self.pinned_per_layer, end)
        return array("I", (layer * self.clusters_per_layer + n for layer in range(layers) for n in rest))


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
        """Slots to hand to the loader, so that it has its stock and one for each waiting cluster.

        free, waiting, received: as the loader last said; what was granted and not received yet counts as free. Our
        own free slots go first; then `evict(n)` gives up to n more.
        """
        if self.region.holds_everything:
            return self.take(len(self._free))
        want = max(0, self.region.stock + waiting - free - (self._granted - received))
        granted = self.take(want)
        if len(granted) < want:
            evicted = evict(want - len(granted))
            self._granted += len(evicted)
            granted += evicted
        return granted
