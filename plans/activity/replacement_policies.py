"""Simulations of replacement policies of a cache with one pool of clusters.

A step accesses a set of distinct clusters. None of them is evicted in the same step, as the worker's read window
guarantees. At first the most frequent clusters are resident.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.intp]
NEVER = np.iinfo(np.int64).max


def smallest(values: NDArray[Any], count: int) -> Ids:
    return np.argpartition(values, count - 1)[:count] if count else np.empty(0, dtype=np.intp)


class Policy(ABC):
    """Base of the policies.

    order: all clusters, most frequent first
    slots: number of clusters that fit the cache
    pinned_share: share of the slots whose clusters, the most frequent ones, are never evicted
    """

    def __init__(self, order: Ids, slots: int, pinned_share: float = 0.0) -> None:
        self.resident = np.zeros(len(order), dtype=bool)
        self.resident[order[:slots]] = True
        self.pinned = np.zeros(len(order), dtype=bool)
        self.pinned[order[: int(slots * pinned_share)]] = True

    def step(self, accessed: Ids) -> int:
        """Access clusters and return the number of misses. Absent clusters become resident if enough others can be
        evicted."""
        missing = accessed[~self.resident[accessed]]
        self._record_access(accessed)
        if len(missing):
            free = self.resident & ~self.pinned
            free[accessed] = False
            victims = self._choose_victims(free, len(missing))
            self.resident[victims] = False
            self.resident[missing[: len(victims)]] = True
            self._record_load(missing[: len(victims)])
        return len(missing)

    @abstractmethod
    def _record_access(self, accessed: Ids) -> None:
        """Record an access of clusters, resident or not. `step` calls it before evictions."""

    @abstractmethod
    def _choose_victims(self, free: NDArray[np.bool_], count: int) -> Ids:
        """Return up to `count` clusters to evict. free: mask of those that may be evicted."""

    def _record_load(self, loaded: Ids) -> None:  # noqa: B027 - most policies ignore loads
        """Record that clusters became resident."""


class Static(Policy):
    """No eviction: the most frequent clusters stay resident, absent clusters are read and dropped."""

    def _record_access(self, accessed: Ids) -> None:
        pass

    def _choose_victims(self, free: NDArray[np.bool_], count: int) -> Ids:
        return np.empty(0, dtype=np.intp)


class Lru(Policy):
    """Eviction of the least recently used cluster. Only for comparison: a cache with one word per cluster cannot
    implement it.

    The queue contains every use. A use is skipped if the cluster was used again later.
    """

    def __init__(self, order: Ids, slots: int, pinned_share: float = 0.0) -> None:
        super().__init__(order, slots, pinned_share)
        self._used = np.empty(len(order), dtype=np.int64)
        self._used[order] = -np.arange(len(order))  # as if the most frequent cluster had been used last
        self._queue: deque[tuple[int, Ids]] = deque((0, part) for part in np.array_split(order[::-1], 64))
        self._now = 0

    def _record_access(self, accessed: Ids) -> None:
        self._now += 1
        self._used[accessed] = self._now
        self._queue.append((self._now, accessed))

    def _choose_victims(self, free: NDArray[np.bool_], count: int) -> Ids:
        chosen: list[Ids] = []
        while count and self._queue and self._queue[0][0] < self._now:
            when, uses = self._queue.popleft()
            latest = self._used[uses] == when if when else self._used[uses] <= 0
            last = uses[latest & free[uses]]
            chosen.append(last[:count])
            if len(last) > count:
                self._queue.appendleft((when, last[count:]))
            count -= min(count, len(last))
        return np.concatenate(chosen) if chosen else np.empty(0, dtype=np.intp)


class Lfu(Policy):
    """Eviction of the least frequently used cluster; the weight of a use halves after half_life_steps. The cache's rule
    for whole experts; a scan of all clusters takes too long where there are many."""

    def __init__(self, order: Ids, slots: int, half_life_steps: float) -> None:
        super().__init__(order, slots)
        self._used = np.empty(len(order))
        self._used[order] = np.linspace(1e-3, 0, len(order))  # among unused clusters, the most frequent is evicted last
        self._growth, self._weight = 2 ** (1 / half_life_steps), 1.0

    def _record_access(self, accessed: Ids) -> None:
        self._weight *= self._growth
        self._used[accessed] += self._weight

    def _choose_victims(self, free: NDArray[np.bool_], count: int) -> Ids:
        return smallest(np.where(free, self._used, np.inf), min(count, int(free.sum())))


class Optimal(Policy):
    """Eviction of the cluster whose next access is the latest. No policy has fewer misses. steps: all future steps."""

    def __init__(self, order: Ids, slots: int, steps: Sequence[Ids]) -> None:
        super().__init__(order, slots)
        accessed = np.concatenate(steps)
        by_cluster = np.argsort(accessed, kind="stable")
        self._uses = np.append(np.repeat(np.arange(len(steps)), [len(step) for step in steps])[by_cluster], NEVER)
        ends = np.cumsum(np.bincount(accessed, minlength=len(order)))
        self._next, self._ends = np.append(0, ends[:-1]), ends

    def _record_access(self, accessed: Ids) -> None:
        self._next[accessed] += 1

    def _choose_victims(self, free: NDArray[np.bool_], count: int) -> Ids:
        again = np.where(self._next < self._ends, self._uses[self._next], NEVER - 1)
        return smallest(np.where(free, -again, NEVER), min(count, int(free.sum())))


class Clock(Policy):
    """CLOCK with use counts. When the hand passes a cluster, its reference bit becomes a use, up to `max_uses`; without
    the bit it loses a use. A cluster with neither is evicted.

    max_uses: 0: plain CLOCK
    at_look: an access increments the uses directly, and there is no reference bit
    """

    def __init__(
        self, order: Ids, slots: int, pinned_share: float = 0.0, *, max_uses: int = 0, at_look: bool = False
    ) -> None:
        super().__init__(order, slots, pinned_share)
        self._referenced = np.zeros(len(order), dtype=bool)
        self._uses = np.zeros(len(order), dtype=np.int8)
        self._max_uses, self._at_look, self._hand = max_uses, at_look, 0

    def _record_access(self, accessed: Ids) -> None:
        if self._at_look:
            self._uses[accessed] = np.minimum(self._uses[accessed] + 1, self._max_uses)
        else:
            self._referenced[accessed] = True

    def _choose_victims(self, free: NDArray[np.bool_], count: int) -> Ids:
        places = np.flatnonzero(free)
        places = np.roll(places, -int(np.searchsorted(places, self._hand)))
        chosen: list[Ids] = []
        while count and len(places):
            unused = np.flatnonzero(~self._referenced[places] & (self._uses[places] == 0))[:count]
            passed = len(places) if len(unused) < count else int(unused[-1]) + 1
            chosen.append(places[unused])
            self._pass(places[:passed])
            count -= len(unused)
            places = np.delete(places, unused)
        return np.concatenate(chosen) if chosen else np.empty(0, dtype=np.intp)

    def _pass(self, places: Ids) -> None:
        uses = self._uses[places]
        self._uses[places] = np.where(
            self._referenced[places], np.minimum(uses + 1, self._max_uses), np.maximum(uses - 1, 0)
        )
        self._referenced[places] = False
        self._hand = int(places[-1]) + 1


class Queues(Clock):
    """S3-FIFO. New clusters enter a first queue of a tenth of the slots.

    At the end of this queue, clusters that were accessed again move to the main part (a clock of two bits), and others
    are evicted. An evicted cluster is remembered for as many loads as there are slots. If it is loaded again in this
    time, it enters the main part directly.
    """

    FIRST_SHARE = 0.1

    def __init__(self, order: Ids, slots: int, pinned_share: float = 0.0) -> None:
        super().__init__(order, slots, pinned_share, max_uses=3, at_look=True)
        self._slots = slots
        self._arrived = np.full(len(order), -1, dtype=np.int64)  # time of entry into the first queue; -1: not in it
        self._left = np.full(len(order), -NEVER // 2, dtype=np.int64)
        self._time = 0

    def _choose_victims(self, free: NDArray[np.bool_], count: int) -> Ids:
        queued = np.flatnonzero(free & (self._arrived >= 0))
        queued = queued[np.argsort(self._arrived[queued], kind="stable")]
        surplus = queued[: max(0, len(queued) + count - int(self.FIRST_SHARE * self._slots))]
        reused = surplus[self._uses[surplus] > 1]
        self._arrived[reused] = -1
        evicted = surplus[self._uses[surplus] <= 1][:count]
        self._left[evicted] = self._time
        self._arrived[evicted] = -1
        free[evicted] = False
        main = super()._choose_victims(free & (self._arrived < 0), count - len(evicted))
        return np.concatenate((evicted, main))

    def _record_load(self, loaded: Ids) -> None:
        remembered = self._time - self._left[loaded] < self._slots
        self._arrived[loaded] = np.where(remembered, -1, self._time + np.arange(len(loaded)))
        self._uses[loaded] = 1
        self._time += len(loaded)
