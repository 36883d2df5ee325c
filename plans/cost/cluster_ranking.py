"""Clusters by how often they are wanted, what CLOCK misses of them, and which to pin: the problem in README.md.

CLOCK is taken as Che's approximation takes LRU: what was wanted stays for a characteristic time T, in steps, and T is
such that what is there fills the slots. A cluster that a step wants with frequency f is then there with 1 - (1-f)^T,
and wanted but absent with f (1-f)^r, where r is how many whole steps T covers: below one step nothing is seen again.
Tokens are not independent, so the result is multiplied by what was measured over what this says, at the same T.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence

Bins = Sequence[tuple[float, int]]
"""Of one feed-forward, in the order of the package: how often a step wants each of so many clusters."""

# Steps for which CLOCK may hold what was wanted; what lies between is interpolated.
TIMES = (0.0, *(2 ** (n / 4) for n in range(-12, 57)))
GRAINS = 512  # of all slots: as finely as pins are looked for
SPREAD = 0.1  # T varies by so much from step to step: steps do not want equally much
CLASSES_PER_OCTAVE = 16  # of frequencies that count as one
MIN_FREQUENCY = 1e-6
# Misses that are this near are the same: then what adapts to the text is better than what stays.
ALIKE = 0.05
ALIKE_RATE = 0.005  # of what is wanted
# Where CLOCK alone misses no more than this, nothing is pinned: tokens want what the token before did, of which
# frequencies know nothing. A 1B at half resident missed 5.0 % with nothing pinned, and 5.9 % with what seemed best by
# frequency. Where it missed 13.7 %, what seemed best did better: 11.5 %.
LEFT_TO_CLOCK = 0.1


class Ranking:
    """All clusters of one part, as steps of one text or of several want them. measured: of what a step wants, the share
    that CLOCK misses with so large a share of all clusters in memory and nothing pinned; of several texts, which were
    not measured, the ranking for one text, whose factors hold at the same T."""

    def __init__(self, ffns: Sequence[Bins], measured: Callable[[float], float] | Ranking) -> None:
        self._members: dict[int, list[tuple[float, int, int]]] = {}  # class -> frequency, feed-forward, clusters
        for ffn, bins in enumerate(ffns):
            for frequency, clusters in merge_rising_bins(bins):
                self._members.setdefault(_class_of(frequency), []).append((frequency, ffn, clusters))
        for members in self._members.values():
            members.sort(key=lambda one: (-one[0], one[1]))
        self._ffns, self._order = len(ffns), sorted(self._members)
        self._pinned_before = self._counts_before()
        self._best: dict[tuple[int, int], int] = {}
        self._miss_rates: dict[tuple[int, float], float] = {}
        self._pins: dict[int, tuple[int, ...]] = {}
        frequencies, self._before = [], [0.0]
        for name in self._order:
            clusters = sum(one[2] for one in self._members[name])
            frequencies.append(sum(one[0] * one[2] for one in self._members[name]) / clusters)
            self._before.append(self._before[-1] + clusters)
        self.clusters = int(self._before[-1])
        sizes = [after - before for before, after in itertools.pairwise(self._before)]
        self._there = [_sums(sizes, [residency_probability(f, time) for f in frequencies]) for time in TIMES]
        self._missed = [_sums(sizes, [miss_frequency(f, time) for f in frequencies]) for time in TIMES]
        self.wanted = self._missed[0][-1]
        if isinstance(measured, Ranking):
            self._factors: list[float] = measured._factors
        else:
            self._factors = [self._factor(n, measured) for n in range(len(TIMES))]

    def miss_rate(self, slots: int, pinned: float) -> float:
        """Of what a step wants, the share that is absent when the `pinned` hottest stay and CLOCK has the other
        slots."""
        if slots >= self.clusters or not self.wanted:
            return 0.0
        if (slots, pinned) not in self._miss_rates:  # a search asks six times for the same
            self._miss_rates[slots, pinned] = self._miss_rate(slots, pinned)
        return self._miss_rates[slots, pinned]

    def _miss_rate(self, slots: int, pinned: float) -> float:
        place, room = self._place(pinned), max(0.0, slots - pinned)
        n = bisect.bisect_right(range(len(TIMES)), room, key=lambda n: self._cached(n, place)) - 1
        if n < 0 or n + 1 == len(TIMES):
            return self._rate(max(n, 0), place)
        low, high = self._cached(n, place), self._cached(n + 1, place)
        share = (room - low) / (high - low) if high > low else 0.0
        return (1 - share) * self._rate(n, place) + share * self._rate(n + 1, place)

    def best_pinned(self, slots: int, most: int) -> int:
        """How many of the hottest to pin, up to `most`: the fewest of those with hardly more misses than the best. For
        one in some hundred numbers of slots; a search asks for thousands that are next to each other."""
        grain = max(1, self.clusters // GRAINS)
        asked = slots // grain * grain, most // grain * grain
        if asked not in self._best:
            self._best[asked] = self._best_of(*asked)
        return self._best[asked]

    def _best_of(self, slots: int, most: int) -> int:
        if slots >= self.clusters or most <= 0 or self.miss_rate(slots, 0) <= LEFT_TO_CLOCK:
            return 0
        counts = {0, most, *(min(most, int(found)) for n in range(len(TIMES)) if (found := self.pinned_at(n, slots)))}
        rates = {count: self.miss_rate(slots, count) for count in counts}
        least = min(rates.values())
        return min(count for count, rate in rates.items() if rate <= max(least * (1 + ALIKE), least + ALIKE_RATE))

    def pinned_at(self, n: int, slots: int) -> float | None:
        """How many of the hottest to pin so that the slots are full where CLOCK holds what was wanted for TIMES[n];
        None where that is more than fits, even with nothing pinned."""
        spare = slots - self._there[n][-1]
        if spare < 0:
            return None
        costs = [count - there for count, there in zip(self._before, self._there[n], strict=True)]
        k = bisect.bisect_right(costs, spare) - 1
        if k + 1 == len(costs):
            return self._before[-1]
        share = (spare - costs[k]) / (costs[k + 1] - costs[k])
        return self._before[k] + share * (self._before[k + 1] - self._before[k])

    def pins(self, count: int) -> tuple[int, ...]:
        """Of each feed-forward, how many of its first clusters are among the `count` hottest of all."""
        if count not in self._pins:
            self._pins[count] = self._pins_of(count)
        return self._pins[count]

    def _pins_of(self, count: int) -> tuple[int, ...]:
        k, _ = self._place(count)
        pinned, left = list(self._pinned_before[k]), count - int(self._before[k])
        for _, ffn, clusters in self._members[self._order[k]]:
            if clusters >= left:
                pinned[ffn] += left
                break
            pinned[ffn] += clusters
            left -= clusters
        return tuple(pinned)

    def _counts_before(self) -> list[tuple[int, ...]]:
        """Of each class, how many clusters of each feed-forward are in hotter ones."""
        counts, before = [0] * self._ffns, []
        for name in self._order:
            before.append(tuple(counts))
            for _, ffn, clusters in self._members[name]:
                counts[ffn] += clusters
        return before

    def _factor(self, n: int, measured: Callable[[float], float]) -> float:
        """What was measured over what is computed for this time, with nothing pinned; 1 where nothing is seen again,
        since there what was measured at other shares says nothing."""
        if not whole_steps(TIMES[n]):
            return 1.0
        computed = self._missed[n][-1]
        return measured(min(1.0, self._there[n][-1] / self.clusters)) * self.wanted / computed if computed else 0.0

    def _place(self, count: float) -> tuple[int, float]:
        """Where so many of the hottest end: a class, and which part of it."""
        k = min(bisect.bisect_right(self._before, count), len(self._before) - 1) - 1
        return k, (count - self._before[k]) / (self._before[k + 1] - self._before[k])

    def _cached(self, n: int, place: tuple[int, float]) -> float:
        """Of what is not pinned, how much is there."""
        return self._there[n][-1] - _within(self._there[n], place)

    def _rate(self, n: int, place: tuple[int, float]) -> float:
        left = self._missed[n][-1] - _within(self._missed[n], place)
        unpinned = self.wanted - _within(self._missed[0], place)
        return max(0.0, min(unpinned, self._factors[n] * left)) / self.wanted


def occupied_slots(slots: int, reserved: int) -> int:
    """Of so many slots, of which some are to be kept free, how many hold something on average: half of those are taken
    before the cache frees others."""
    return slots - reserved // 2


def residency_probability(frequency: float, time_steps: float) -> float:
    """How probably a cluster is there that stays for so many steps after it was wanted."""
    return 1 - math.pow(1 - frequency, time_steps) if time_steps else 0.0


def miss_frequency(frequency: float, time_steps: float) -> float:
    """How often it is wanted while it is not there, tokens being independent."""
    return frequency * math.pow(1 - frequency, whole_steps(time_steps))


def whole_steps(time_steps: float) -> float:
    """How many steps ago something may have been wanted last and still be there: the mean of whole numbers, since the
    time varies."""
    low, high = (1 - SPREAD) * time_steps, (1 + SPREAD) * time_steps
    return (_floors(high) - _floors(low)) / (high - low) if high > low else 0.0


def merge_rising_bins(bins: Bins) -> list[tuple[float, int]]:
    """Bins with neighbours that rise put together, by their mean: what comes first is pinned first. None is empty."""
    kept: list[tuple[float, int]] = []
    for frequency, clusters in bins:
        if not clusters:
            continue
        while kept and kept[-1][0] < frequency:
            before, many = kept.pop()
            frequency = (before * many + frequency * clusters) / (many + clusters)
            clusters += many
        kept.append((frequency, clusters))
    return kept


def _class_of(frequency: float) -> int:
    return round(-CLASSES_PER_OCTAVE * math.log2(max(frequency, MIN_FREQUENCY)))


def _floors(x: float) -> float:
    """The integral of the whole part from 0 to x."""
    whole = math.floor(x)
    return whole * (whole - 1) / 2 + whole * (x - whole)


def _sums(sizes: Sequence[float], each: Sequence[float]) -> list[float]:
    total, sums = 0.0, [0.0]
    for size, value in zip(sizes, each, strict=True):
        total += size * value
        sums.append(total)
    return sums


def _within(sums: Sequence[float], place: tuple[int, float]) -> float:
    k, share = place
    return sums[k] + share * (sums[k + 1] - sums[k])
