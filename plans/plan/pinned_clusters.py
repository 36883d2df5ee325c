"""Pinned clusters: how many of the first clusters of each feed-forward stay in memory, as a plan states it.

There is a feed-forward for each layer and expert, in the order of the package; its first clusters are its hottest.
Counts are written as runs, since a mixture has thousands of feed-forwards and most have equal counts: "12" means 12 of
each, "12x3 0x5" means 12 of each of the first three feed-forwards and none of the next five.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from neuronpipe.protocol.errors import quoted
from neuronpipe.protocol.frozen import frozen

RUN = re.compile(r"(\d{1,7})x(\d{1,7})")


@frozen(kw_only=True)
class Pins:
    """The pinned clusters while steps compute at least `texts` sequences, and fewer than in a plan's next entry."""

    texts: int
    triggers: str
    values: str

    def counts(self, ffns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the pinned triggers and the pinned values of each of `ffns` feed-forwards. Raises as `read_counts`."""
        return read_counts(self.triggers, ffns), read_counts(self.values, ffns)


def write_counts(counts: Iterable[int]) -> str:
    """Return counts as runs, or as one number if all are equal."""
    runs = [(count, len(list(equal_counts))) for count, equal_counts in itertools.groupby(counts)]
    if len(runs) == 1:
        return str(runs[0][0])
    return " ".join(f"{count}x{length}" for count, length in runs)


def range_of_counts(text: str) -> str:
    """Format written counts for reports: the smallest and the largest, `5 to 6`, or one number if all are equal."""
    numbers = sorted({int(run.split("x")[0]) for run in text.split()})
    return f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"


@lru_cache(maxsize=16)
def read_counts(text: str, ffns: int) -> tuple[int, ...]:
    """Return the count of each of `ffns` feed-forwards. Raises ValueError if `text` does not state exactly these."""
    if re.fullmatch(r"\d{1,7}", text):
        return (int(text),) * ffns
    counts: list[int] = []
    for run in text.split(" "):
        match = RUN.fullmatch(run)
        if match is None:
            raise ValueError(f"{quoted(run)} is neither a number nor a run as 12x3")
        count, length = int(match[1]), int(match[2])
        if len(counts) + length > ffns:
            raise ValueError(f"runs for more than {ffns} feed-forwards")
        counts += [count] * length
    if len(counts) != ffns:
        raise ValueError(f"runs for {len(counts)} feed-forwards, but there are {ffns}")
    return tuple(counts)


def warm_counts(pinned: Sequence[int], clusters: int, slots: int) -> tuple[int, ...]:
    """Return how many first clusters of each feed-forward to load during warm-up.

    These are all pinned clusters and, of every feed-forward, as many clusters as slots allow, the same number of each.
    Slots that are left get one more cluster of feed-forwards that lie evenly among all: an expert may be one cluster.

    pinned: pinned clusters of each feed-forward
    clusters: clusters of one feed-forward
    """
    low, high = 0, clusters
    while low < high:
        level = (low + high + 1) // 2
        if sum(max(level, count) for count in pinned) <= slots:
            low = level
        else:
            high = level - 1
    counts = [max(low, count) for count in pinned]
    may_grow = [number for number, count in enumerate(counts) if count == low < clusters]
    left = max(0, min(slots - sum(counts), len(may_grow)))
    for n in range(left):
        counts[may_grow[n * len(may_grow) // left]] += 1
    return tuple(counts)


def pins_within(counts: tuple[int, ...], slots: int, moving: int, clusters: int) -> tuple[int, ...]:
    """Return the counts of clusters that stay pinned if there are only `slots` slots.

    If fewer than `moving` slots would be unpinned, the counts of all feed-forwards shrink by the same share. If every
    cluster has a slot, all pins stay.

    clusters: clusters of the whole model
    """
    room, total = max(0, slots - moving), sum(counts)
    if slots >= clusters or total <= room:
        return counts
    return tuple(count * room // total for count in counts)


@lru_cache(maxsize=64)
def pinned_slots(text: str, ffns: int, slots: int, moving: int, clusters: int) -> int:
    """Return how many of `slots` slots have a pinned cluster.

    text: counts of all feed-forwards as in `Pins`; the other arguments are those of `pins_within`
    """
    return sum(pins_within(read_counts(text, ffns), slots, moving, clusters))
