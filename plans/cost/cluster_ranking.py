"""Clusters ranked by access frequency, with the misses of CLOCK and the best pins.

The problem, for each part and each number of sequences (1 to 4) in a step:

    given       bins of n_b clusters of one feed-forward, with access frequency f_b;  S occupied slots, M of them moving
    choose      x_b pinned clusters of each bin; T, the steps for which CLOCK keeps what was accessed
    minimize    k(T) x sum of (n_b - x_b) f_b (1 - f_b)^r(T)
    subject to  sum of x_b + (n_b - x_b) (1 - (1 - f_b)^T) <= S,   sum of x_b <= S - M
                a bin of a feed-forward only after all bins before it

Here r(T) is the number of whole steps in T, and k(T) the ratio of measured to modelled misses. Greedy pins by frequency
are within one cluster of an exact solver.

CLOCK is modelled by Che's approximation of LRU: what a step accesses stays for a characteristic time T, in steps, such
that all resident clusters fill the slots. A cluster with access frequency f is resident with probability 1 - (1-f)^T,
and misses with frequency f (1-f)^r, where r is the number of whole steps that T covers: below one step nothing is
accessed again. Tokens are not independent, so the result is multiplied by the ratio of measured to modelled misses at
the same T.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence

Bins = Sequence[tuple[float, int]]
"""(access frequency per step, number of clusters) of one feed-forward, in the order of the package."""

# Characteristic times, in steps; values between them are interpolated.
TIMES = (0.0, *(2 ** (n / 4) for n in range(-12, 57)))
GRAINS = 512  # resolution of the search for pins, in parts of all slots
SPREAD = 0.1  # relative variation of T from step to step, since steps access different amounts
CLASSES_PER_OCTAVE = 16  # frequencies within a class count as equal
MIN_FREQUENCY = 1e-6
# Miss rates within these tolerances count as equal; then fewer pins are better, since CLOCK adapts to the sequence.
ALIKE = 0.05
ALIKE_RATE = 0.005  # of accesses
# Where CLOCK alone misses no more than this, nothing is pinned: tokens repeat accesses of the token before, which
# frequencies do not show. A 1B at half resident missed 5.0 % with nothing pinned, and 5.9 % with the best pins by
# frequency. Where it missed 13.7 %, these pins were better: 11.5 %.
LEFT_TO_CLOCK = 0.1


class Ranking:
    """All clusters of one part, ranked by access frequency in steps of one sequence or of several.

    measured: the share of accesses that CLOCK misses, by resident share, with nothing pinned. For several sequences,
    which were not measured, the ranking for one sequence, whose factors apply at the same T.
    """

    def __init__(self, ffns: Sequence[Bins], measured: Callable[[float], float] | Ranking) -> None:
        self._members: dict[int, list[tuple[float, int, int]]] = {}  # class -> frequency, feed-forward, clusters
        for ffn, bins in enumerate(ffns):
            for frequency, clusters in merge_rising_bins(bins):
                self._members.setdefault(_class_of(frequency), []).append((frequency, ffn, clusters))
        for members in self._members.values():
            members.sort(key=lambda member: (-member[0], member[1]))  # hottest first
        self._ffns, self._order = len(ffns), sorted(self._members)
        self._pinned_before = self._counts_before()
        self._best: dict[tuple[int, int], int] = {}
        self._miss_rates: dict[tuple[int, float], float] = {}
        self._pins: dict[int, tuple[int, ...]] = {}
        frequencies, self._before = [], [0.0]
        for name in self._order:
            clusters = sum(member[2] for member in self._members[name])
            frequencies.append(sum(member[0] * member[2] for member in self._members[name]) / clusters)
            self._before.append(self._before[-1] + clusters)
        self.clusters = int(self._before[-1])
        sizes = [after - before for before, after in itertools.pairwise(self._before)]
        self._resident = [_sums(sizes, [residency_probability(f, time) for f in frequencies]) for time in TIMES]
        self._misses = [_sums(sizes, [miss_frequency(f, time) for f in frequencies]) for time in TIMES]
        self.accesses = self._misses[0][-1]
        if isinstance(measured, Ranking):
            self._factors: list[float] = measured._factors
        else:
            self._factors = [self._factor(n, measured) for n in range(len(TIMES))]

    def miss_rate(self, slots: int, pinned: float) -> float:
        """Return the share of accesses that miss while the `pinned` hottest clusters stay and CLOCK has the other
        slots."""
        if slots >= self.clusters or not self.accesses:
            return 0.0
        if (slots, pinned) not in self._miss_rates:  # a search calls this six times with the same arguments
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

    def best_pinned(self, slots: int, max_pinned: int) -> int:
        """Return how many of the hottest clusters to pin: the fewest with hardly more misses than the best number.

        Arguments are rounded to a grid, since a search calls this with thousands of nearly equal numbers.
        """
        grain = max(1, self.clusters // GRAINS)
        rounded = slots // grain * grain, max_pinned // grain * grain
        if rounded not in self._best:
            self._best[rounded] = self._best_of(*rounded)
        return self._best[rounded]

    def _best_of(self, slots: int, max_pinned: int) -> int:
        if slots >= self.clusters or max_pinned <= 0 or self.miss_rate(slots, 0) <= LEFT_TO_CLOCK:
            return 0
        counts = {
            0,
            max_pinned,
            *(min(max_pinned, int(pinned)) for n in range(len(TIMES)) if (pinned := self.pinned_at(n, slots))),
        }
        rates = {count: self.miss_rate(slots, count) for count in counts}
        min_rate = min(rates.values())
        return min(count for count, rate in rates.items() if rate <= max(min_rate * (1 + ALIKE), min_rate + ALIKE_RATE))

    def pinned_at(self, n: int, slots: int) -> float | None:
        """Return how many of the hottest clusters to pin so that T is TIMES[n]; None if the slots are too few for
        that T."""
        spare = slots - self._resident[n][-1]
        if spare < 0:
            return None
        costs = [count - resident for count, resident in zip(self._before, self._resident[n], strict=True)]
        k = bisect.bisect_right(costs, spare) - 1
        if k + 1 == len(costs):
            return self._before[-1]
        share = (spare - costs[k]) / (costs[k + 1] - costs[k])
        return self._before[k] + share * (self._before[k + 1] - self._before[k])

    def pins(self, count: int) -> tuple[int, ...]:
        """Return how many first clusters of each feed-forward are among the `count` hottest of all."""
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
        """Return, for each class, how many clusters of each feed-forward are in hotter classes."""
        counts, before = [0] * self._ffns, []
        for name in self._order:
            before.append(tuple(counts))
            for _, ffn, clusters in self._members[name]:
                counts[ffn] += clusters
        return before

    def _factor(self, n: int, measured: Callable[[float], float]) -> float:
        """Return the ratio of measured to modelled misses at this T, with nothing pinned.

        1 below one step: nothing is accessed again then, and measurements at other resident shares do not apply.
        """
        if not whole_steps(TIMES[n]):
            return 1.0
        computed = self._misses[n][-1]
        return measured(min(1.0, self._resident[n][-1] / self.clusters)) * self.accesses / computed if computed else 0.0

    def _place(self, count: float) -> tuple[int, float]:
        """Return where the `count` hottest clusters end: a class, and which part of it."""
        k = min(bisect.bisect_right(self._before, count), len(self._before) - 1) - 1
        return k, (count - self._before[k]) / (self._before[k + 1] - self._before[k])

    def _cached(self, n: int, place: tuple[int, float]) -> float:
        """Return how many unpinned clusters are resident."""
        return self._resident[n][-1] - _within(self._resident[n], place)

    def _rate(self, n: int, place: tuple[int, float]) -> float:
        left = self._misses[n][-1] - _within(self._misses[n], place)
        unpinned = self.accesses - _within(self._misses[0], place)
        return max(0.0, min(unpinned, self._factors[n] * left)) / self.accesses


def occupied_slots(slots: int, reserved: int) -> int:
    """Return how many slots are occupied on average: half of the reserved slots are in use before the cache frees
    more."""
    return slots - reserved // 2


def residency_probability(frequency: float, time_steps: float) -> float:
    """Return the probability that a cluster is resident which stays this many steps after an access."""
    return 1 - math.pow(1 - frequency, time_steps) if time_steps else 0.0


def miss_frequency(frequency: float, time_steps: float) -> float:
    """Return how often a cluster is accessed while it is not resident, for independent tokens."""
    return frequency * math.pow(1 - frequency, whole_steps(time_steps))


def whole_steps(time_steps: float) -> float:
    """Return the number of whole steps that T covers: a mean, since T varies."""
    low, high = (1 - SPREAD) * time_steps, (1 + SPREAD) * time_steps
    return (_floors(high) - _floors(low)) / (high - low) if high > low else 0.0


def merge_rising_bins(bins: Bins) -> list[tuple[float, int]]:
    """Return the bins with rising neighbours merged to their mean, since the first clusters are pinned first. None
    is empty."""
    merged: list[tuple[float, int]] = []
    for frequency, clusters in bins:
        if not clusters:
            continue
        while merged and merged[-1][0] < frequency:
            before, before_clusters = merged.pop()
            frequency = (before * before_clusters + frequency * clusters) / (before_clusters + clusters)
            clusters += before_clusters
        merged.append((frequency, clusters))
    return merged


def _class_of(frequency: float) -> int:
    return round(-CLASSES_PER_OCTAVE * math.log2(max(frequency, MIN_FREQUENCY)))


def _floors(x: float) -> float:
    """Return the integral of the whole part from 0 to x."""
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
