"""Clusters ranked by access frequency, with the misses of CLOCK and the best pins.

The problem, for each part and each number of sequences (1 to 4) in a step:

    given       bins of n_b clusters of one feed-forward, with access frequency f_b;  S occupied slots, M of them moving
    choose      x_b pinned clusters of each bin; T, the steps for which CLOCK keeps what was accessed
    minimize    k(T) x sum of (n_b - x_b) f_b (1 - f_b)^r(T)
    subject to  sum of x_b + (n_b - x_b) (1 - (1 - f_b)^T) <= S,   sum of x_b <= S - M
                clusters of a bin are pinned only if all bins of its feed-forward before it are

Here r(T) is the number of whole steps in T, and k(T) the ratio of measured to modelled misses. Pinning greedily by
frequency gives the pins of an exact solver within one cluster.

CLOCK is modelled by Che's approximation of LRU: an accessed cluster stays for a characteristic time of T steps, where T
is such that all resident clusters fill the slots. A cluster with access frequency f is resident with probability
1 - (1-f)^T, and misses with frequency f (1-f)^r: if T covers no whole step, nothing is still resident at its next
access. Tokens are not independent, so the result is multiplied by k(T).
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
GRAINS = 512  # resolution of the search for pins: slots are rounded to this part of all clusters
SPREAD = 0.1  # relative variation of T from step to step, since steps access different amounts
CLASSES_PER_OCTAVE = 16  # classes of nearly equal frequency for each factor of two
MIN_FREQUENCY = 1e-6  # lower frequencies are in the class of this one
# Miss rates count as equal if they differ by less than one of these. Then fewer pins are better, since CLOCK adapts to
# the sequence.
ALIKE = 0.05  # relative to the lower miss rate
ALIKE_RATE = 0.005  # absolute
# If CLOCK alone misses no more than this share of accesses, nothing is pinned: tokens repeat accesses of the token
# before, which frequencies do not show. A 1B at half resident missed 5.0 % with nothing pinned, and 5.9 % with the best
# pins by frequency. Where it missed 13.7 % with nothing pinned, these pins were better: 11.5 %.
LEFT_TO_CLOCK = 0.1


class Ranking:
    """All clusters of one part, ranked by access frequency in steps of one sequence or of several.

    clusters: number of all clusters
    accesses: mean number of clusters that a step accesses

    measured: the share of accesses that CLOCK misses with nothing pinned, by resident share. Misses were not measured
        with several sequences: then it is the ranking for one sequence, whose factors k(T) are used
    measured_from: the smallest resident share whose misses were measured; with less, k(T) is that of this share
    """

    def __init__(
        self, ffns: Sequence[Bins], measured: Callable[[float], float] | Ranking, measured_from: float = 0.0
    ) -> None:
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
            self._factors = [self._factor(n, measured, measured_from) for n in range(len(TIMES))]

    def miss_rate(self, slots: int, pinned: float) -> float:
        """Return the share of accesses that miss if the `pinned` hottest clusters stay and CLOCK has the other slots.

        slots: occupied slots, including those of pinned clusters
        """
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

        Arguments are rounded down to a grid, since a search calls this with thousands of nearly equal numbers.

        slots: occupied slots, including those of pinned clusters
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
        """Return how many of the hottest clusters to pin so that T is TIMES[n]; None if that T needs more slots even
        with nothing pinned."""
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
        """Return, for each feed-forward, how many of its clusters are among the `count` hottest of all."""
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

    def _factor(self, n: int, measured: Callable[[float], float], measured_from: float) -> float:
        """Return k(T), the ratio of measured to modelled misses with nothing pinned, for T = TIMES[n].

        1 if T covers no whole step: everything misses then, and measurements with more memory do not apply.
        """
        if not whole_steps(TIMES[n]):
            return 1.0
        while n + 1 < len(TIMES) and self._resident[n][-1] < measured_from * self.clusters:
            n += 1
        computed = self._misses[n][-1]
        return measured(min(1.0, self._resident[n][-1] / self.clusters)) * self.accesses / computed if computed else 0.0

    def _place(self, count: float) -> tuple[int, float]:
        """Return where the `count` hottest clusters end: the position of a class, and the share of it before the
        end."""
        k = min(bisect.bisect_right(self._before, count), len(self._before) - 1) - 1
        return k, (count - self._before[k]) / (self._before[k + 1] - self._before[k])

    def _cached(self, n: int, place: tuple[int, float]) -> float:
        """Return how many clusters behind `place`, which are unpinned, are resident with T = TIMES[n]."""
        return self._resident[n][-1] - _within(self._resident[n], place)

    def _rate(self, n: int, place: tuple[int, float]) -> float:
        left = self._misses[n][-1] - _within(self._misses[n], place)
        unpinned = self.accesses - _within(self._misses[0], place)
        return max(0.0, min(unpinned, self._factors[n] * left)) / self.accesses


def occupied_slots(slots: int, reserved: int) -> int:
    """Return how many slots are occupied: the loader reports used slots before each wait, and the cache replaces them
    within a fraction of a layer's time, so that the reserved ones are nearly always free."""
    return slots - reserved


def residency_probability(frequency: float, time_steps: float) -> float:
    """Return the probability that a cluster is resident, if it stays for `time_steps` steps after an access.

    frequency: share of steps that access the cluster
    """
    return 1 - math.pow(1 - frequency, time_steps) if time_steps else 0.0


def miss_frequency(frequency: float, time_steps: float) -> float:
    """Return in what share of steps a cluster is accessed and not resident, if tokens were independent.

    time_steps: for how many steps it stays after an access
    """
    return frequency * math.pow(1 - frequency, whole_steps(time_steps))


def whole_steps(time_steps: float) -> float:
    """Return the mean number of whole steps that T covers, while T varies by SPREAD around `time_steps`."""
    low, high = (1 - SPREAD) * time_steps, (1 + SPREAD) * time_steps
    return (_floors(high) - _floors(low)) / (high - low) if high > low else 0.0


def merge_rising_bins(bins: Bins) -> list[tuple[float, int]]:
    """Return the bins without empty ones, and with bins merged to their mean frequency until no frequency rises.

    The first clusters of a feed-forward are always pinned first, so a hotter bin behind a colder one gains nothing.
    """
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
    """Return the integral of floor from 0 to x."""
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
