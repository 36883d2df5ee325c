"""Replacement policies over one pool of clusters, a layer's step at a time. Pure; numpy only.

A step is a set of distinct clusters that are looked up. `step` returns how many of them were absent; afterwards all of
them are resident, and none was evicted in the same step, as the worker's read window ensures. Clusters are numbered
hottest first within each layer; a pool starts filled with the most frequent ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.intp]
NEVER = np.iinfo(np.int64).max


class Policy(ABC):
    """slots: clusters that fit. order: all clusters, most frequent first. pinned_share: of the slots, for good."""

    def __init__(self, order: Ids, slots: int, pinned_share: float = 0.0) -> None:
        self.resident = np.zeros(len(order), dtype=bool)
        self.resident[order[:slots]] = True
        self.pinned = np.zeros(len(order), dtype=bool)
        self.pinned[order[: int(slots * pinned_share)]] = True

    def step(self, wanted: Ids) -> int:
        """Look `wanted` up; returns the misses."""
        missing = wanted[~self.resident[wanted]]
        self._look(wanted)
        if len(missing):
            free = self.resident & ~self.pinned
            free[wanted] = False
            victims = self._choose(free, len(missing))
            self.resident[victims] = False
            self.resident[missing[: len(victims)]] = True
            self._arrive(missing[: len(victims)])
        return len(missing)

    @abstractmethod
    def _look(self, wanted: Ids) -> None:
        """Remember what was looked up, resident or not."""

    @abstractmethod
    def _choose(self, free: NDArray[np.bool_], count: int) -> Ids:
        """Up to `count` of those that are free to go."""

    def _arrive(self, loaded: Ids) -> None:  # noqa: B027 - most policies have nothing to remember of it
        """These are resident now."""


class Static(Policy):
    """The most frequent clusters, for good: what is absent is read and dropped."""

    def _look(self, wanted: Ids) -> None:
        pass

    def _choose(self, free: NDArray[np.bool_], count: int) -> Ids:
        return np.empty(0, dtype=np.intp)


class Lru(Policy):
    """The least recently used goes. Too dear for a word per cluster; the measure of the others."""

    def __init__(self, order: Ids, slots: int, pinned_share: float = 0.0) -> None:
        super().__init__(order, slots, pinned_share)
        self._used = np.empty(len(order), dtype=np.int64)
        self._used[order] = -np.arange(len(order))  # as if the hottest had been used last
        self._now = 0

    def _look(self, wanted: Ids) -> None:
        self._now += 1
        self._used[wanted] = self._now

    def _choose(self, free: NDArray[np.bool_], count: int) -> Ids:
        ages = np.where(free, self._used, NEVER)
        count = min(count, int(free.sum()))
        return np.argpartition(ages, count - 1)[:count] if count else np.empty(0, dtype=np.intp)


class Clock(Policy):
    """A hand goes round: a look adds one to a cluster's count, up to `most`, the hand takes one from it, and what it
    finds at zero goes. most = 1 is the reference bit; 2 and 3 need two bits."""

    def __init__(self, order: Ids, slots: int, pinned_share: float = 0.0, most: int = 1) -> None:
        super().__init__(order, slots, pinned_share)
        self._count = np.zeros(len(order), dtype=np.int8)
        self._most, self._hand = most, 0

    def _look(self, wanted: Ids) -> None:
        self._count[wanted] = np.minimum(self._count[wanted] + 1, self._most)

    def _choose(self, free: NDArray[np.bool_], count: int) -> Ids:
        places = np.flatnonzero(free)
        places = np.roll(places, -int(np.searchsorted(places, self._hand)))
        chosen: list[Ids] = []
        while count and len(places):
            at_zero = np.flatnonzero(self._count[places] == 0)[:count]
            passed = len(places) if len(at_zero) < count else int(at_zero[-1]) + 1
            chosen.append(places[at_zero])
            seen = places[:passed]
            self._count[seen] = np.maximum(self._count[seen] - 1, 0)
            self._hand = int(seen[-1]) + 1
            count -= len(at_zero)
            places = np.delete(places, at_zero)
        return np.concatenate(chosen) if chosen else np.empty(0, dtype=np.intp)


class Queues(Clock):
    """After S3-FIFO: a tenth of the slots is a first queue, in order of arrival. What is looked up again there moves to
    the main part (a clock of two bits); the rest is evicted. The last evicted clusters, as many as there are slots, are
    remembered: one of them that comes back goes to the main part at once."""

    FIRST_SHARE = 0.1

    def __init__(self, order: Ids, slots: int, pinned_share: float = 0.0) -> None:
        super().__init__(order, slots, pinned_share, most=3)
        self._slots = slots
        self._arrived = np.full(len(order), -1, dtype=np.int64)  # in the first queue since; -1: not in it
        self._left = np.full(len(order), -NEVER // 2, dtype=np.int64)
        self._time = 0

    def _choose(self, free: NDArray[np.bool_], count: int) -> Ids:
        first = np.flatnonzero(free & (self._arrived >= 0))
        first = first[np.argsort(self._arrived[first], kind="stable")]
        surplus = first[: max(0, len(first) + count - int(self.FIRST_SHARE * self._slots))]
        again = surplus[self._count[surplus] > 1]
        self._arrived[again] = -1
        gone = surplus[self._count[surplus] <= 1][:count]
        self._left[gone] = self._time
        self._arrived[gone] = -1
        free[gone] = False
        main = super()._choose(free & (self._arrived < 0), count - len(gone))
        return np.concatenate((gone, main))

    def _arrive(self, loaded: Ids) -> None:
        remembered = self._time - self._left[loaded] < self._slots
        self._arrived[loaded] = np.where(remembered, -1, self._time + np.arange(len(loaded)))
        self._count[loaded] = 1
        self._time += len(loaded)
