"""Which clusters stay in memory: how many of the first of each feed-forward, as a plan states it.

A feed-forward is one (layer, expert), in the order of the package; its first clusters are its hottest. Counts are
written as runs, since a mixture has thousands of feed-forwards and most are alike: "12" is 12 of each, "12x3 0x5" 12 of
each of the first three and none of the next five.
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
    """What stays while steps compute at least so many texts."""

    texts: int
    triggers: str
    values: str

    def counts(self, ffns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of so many feed-forwards: pinned triggers and pinned values. Raises ValueError."""
        return read_counts(self.triggers, ffns), read_counts(self.values, ffns)


def write_counts(counts: Iterable[int]) -> str:
    """The counts as runs; one number where all are alike."""
    runs = [(count, len(list(alike))) for count, alike in itertools.groupby(counts)]
    if len(runs) == 1:
        return str(runs[0][0])
    return " ".join(f"{count}x{length}" for count, length in runs)


@lru_cache(maxsize=16)
def read_counts(text: str, ffns: int) -> tuple[int, ...]:
    """One count for each of so many feed-forwards. Raises ValueError, saying what is wrong."""
    if re.fullmatch(r"\d{1,7}", text):
        return (int(text),) * ffns
    counts: list[int] = []
    for run in text.split(" "):
        found = RUN.fullmatch(run)
        if found is None:
            raise ValueError(f"{quoted(run)} is neither a number nor a run as 12x3")
        count, length = int(found[1]), int(found[2])
        if len(counts) + length > ffns:
            raise ValueError(f"runs for more than {ffns} feed-forwards")
        counts += [count] * length
    if len(counts) != ffns:
        raise ValueError(f"runs for {len(counts)} feed-forwards, but there are {ffns}")
    return tuple(counts)


def warm_counts(pinned: Sequence[int], clusters: int, slots: int) -> tuple[int, ...]:
    """Of each feed-forward of so many clusters, the first ones that are worth loading before anybody asks, the pinned
    ones among them: of all as many, as long as there are slots."""
    low, high = 0, clusters
    while low < high:
        level = (low + high + 1) // 2
        if sum(max(level, count) for count in pinned) <= slots:
            low = level
        else:
            high = level - 1
    return tuple(max(low, count) for count in pinned)


def pins_within(counts: tuple[int, ...], slots: int, moving: int, clusters: int) -> tuple[int, ...]:
    """What can stay while there are so many slots, `moving` of which stay free for others: of each feed-forward the
    same share less; everything where all clusters have a slot."""
    room, total = max(0, slots - moving), sum(counts)
    if slots >= clusters or total <= room:
        return counts
    return tuple(count * room // total for count in counts)
