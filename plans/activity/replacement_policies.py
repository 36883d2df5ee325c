"""Replacement policies over one pool of clusters, a layer's step at a time. Pure; numpy only.

A step is a set of distinct clusters that are looked up. `step` returns how many of them were absent; afterwards all of
them are resident, and none was evicted in the same step, as the worker's read window ensures. Clusters are numbered
hottest first within each layer; a pool starts filled with the most frequent ones.
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


def least(values: NDArray[Any], count: int) -> Ids:
    """Where the `count` least values are."""
    return np.argpartition(values, count - 1)[:count] if count else np.empty(0, dtype=np.intp)


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
    """The least recently used goes. Too dear for a word per cluster; the measure of the others. A queue of uses: those
    that were followed by another one are passed over."""

    def __init__(self, order: Ids, slots: int, pinned_share: float = 0.0) -> None:
        super().__init__(order, slots, pinned_share)
        self._used = np.empty(len(order), dtype=np.int64)
        self._used[order] = -np.arange(len(order))  # as if the hottest had been used last
        self._queue: deque[tuple[int, Ids]] = deque((0, part) for part in np.array_split(order[::-1], 64))
        self._now = 0

    def _look(self, wanted: Ids) -> None:
        self._now += 1
        self._used[wanted] = self._now
        self._queue.append((self._now, wanted))

    def _choose(self, free: NDArray[np.bool_], count: int) -> Ids:
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
    """The least frequently used goes; a use counts half after so many steps. It would need an order of all clusters:
    the measure of policies that count."""

    def __init__(self, order: Ids, slots: int, half_life_steps: float) -> None:
        super().__init__(order, slots)
        self._used = np.empty(len(order))
        self._used[order] = np.linspace(1e-3, 0, len(order))  # the hottest go last, as long as nothing was used
        self._growth, self._weight = 2 ** (1 / half_life_steps), 1.0

    def _look(self, wanted: Ids) -> None:
        self._weight *= self._growth
        self._used[wanted] += self._weight

    def _choose(self, free: NDArray[np.bool_], count: int) -> Ids:
        return least(np.where(free, self._used, np.inf), min(count, int(free.sum())))


class Optimal(Policy):
    """What is wanted again last goes: no policy misses less. It knows the steps beforehand."""

    def __init__(self, order: Ids, slots: int, steps: Sequence[Ids]) -> None:
        super().__init__(order, slots)
        wanted = np.concatenate(steps)
        by_cluster = np.argsort(wanted, kind="stable")
        self._uses = np.append(np.repeat(np.arange(len(steps)), [len(step) for step in steps])[by_cluster], NEVER)
        ends = np.cumsum(np.bincount(wanted, minlength=len(order)))
        self._next, self._ends = np.append(0, ends[:-1]), ends

    def _look(self, wanted: Ids) -> None:
        self._next[wanted] += 1

    def _choose(self, free: NDArray[np.bool_], count: int) -> Ids:
        again = np.where(self._next < self._ends, self._uses[self._next], NEVER - 1)
        return least(np.where(free, -again, NEVER), min(count, int(free.sum())))


class Clock(Policy):
    """A hand goes round: it turns a reference bit into a use, up to `most_uses`, and takes a use away where there is no
    bit; what has neither goes. most_uses = 0 is the plain rule. at_look: a look counts the use itself, and there is
    no bit."""

    def __init__(
        self, order: Ids, slots: int, pinned_share: float = 0.0, *, most_uses: int = 0, at_look: bool = False
    ) -> None:
        super().__init__(order, slots, pinned_share)
        self._referenced = np.zeros(len(order), dtype=bool)
        self._uses = np.zeros(len(order), dtype=np.int8)
        self._most, self._at_look, self._hand = most_uses, at_look, 0

    def _look(self, wanted: Ids) -> None:
        if self._at_look:
            self._uses[wanted] = np.minimum(self._uses[wanted] + 1, self._most)
        else:
            self._referenced[wanted] = True

    def _choose(self, free: NDArray[np.bool_], count: int) -> Ids:
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

    def _pass(self, seen: Ids) -> None:
        uses = self._uses[seen]
        self._uses[seen] = np.where(self._referenced[seen], np.minimum(uses + 1, self._most), np.maximum(uses - 1, 0))
        self._referenced[seen] = False
        self._hand = int(seen[-1]) + 1


class Queues(Clock):
    """After S3-FIFO: a tenth of the slots is a first queue, in order of arrival. What is looked up again there moves to
    the main part (a clock of two bits); the rest is evicted. The last evicted clusters, as many as there are slots, are
    remembered: one of them that comes back goes to the main part at once."""

    FIRST_SHARE = 0.1

    def __init__(self, order: Ids, slots: int, pinned_share: float = 0.0) -> None:
        super().__init__(order, slots, pinned_share, most_uses=3, at_look=True)
        self._slots = slots
        self._arrived = np.full(len(order), -1, dtype=np.int64)  # in the first queue since; -1: not in it
        self._left = np.full(len(order), -NEVER // 2, dtype=np.int64)
        self._time = 0

    def _choose(self, free: NDArray[np.bool_], count: int) -> Ids:
        first = np.flatnonzero(free & (self._arrived >= 0))
        first = first[np.argsort(self._arrived[first], kind="stable")]
        surplus = first[: max(0, len(first) + count - int(self.FIRST_SHARE * self._slots))]
        again = surplus[self._uses[surplus] > 1]
        self._arrived[again] = -1
        gone = surplus[self._uses[surplus] <= 1][:count]
        self._left[gone] = self._time
        self._arrived[gone] = -1
        free[gone] = False
        main = super()._choose(free & (self._arrived < 0), count - len(gone))
        return np.concatenate((gone, main))

    def _arrive(self, loaded: Ids) -> None:
        remembered = self._time - self._left[loaded] < self._slots
        self._arrived[loaded] = np.where(remembered, -1, self._time + np.arange(len(loaded)))
        self._uses[loaded] = 1
        self._time += len(loaded)
