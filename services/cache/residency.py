"""The cache's bookkeeping, without sockets: which slots are free, what to grant, what to warm up first.

a slot is    free (here)  ->  granted (the loader's)  ->  holds a cluster (named by a present word)  ->  free ...
"""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Literal

from neuronpipe.plans.plan.pinned_clusters import warm_counts
from neuronpipe.protocol.frozen import frozen
from neuronpipe.services.runtime.miss_counts import Misses, is_far_above

Counts = tuple[int, ...]
"""Of each feed-forward, how many of its first clusters."""
GROW_AFTER_S: Final = 0.5
SHRINK_AFTER_S: Final = 5.0
FEW_FREE: Final = 64
MAX_IDS_PER_MESSAGE: Final = 1 << 17  # half a MiB packed: few at a time need be held


def packed(ids: Iterable[int]) -> Iterator[bytes]:
    """Cluster or slot numbers as little-endian uint32, in pieces that fit a message each; none for none. Each piece is
    made when it is asked for."""
    left = iter(ids)
    while piece := array("I", itertools.islice(left, MAX_IDS_PER_MESSAGE)):
        yield piece.tobytes()


@frozen(kw_only=True)
class Region:
    """One part's slots, from the plan. reserve: free slots that the loader should have ahead of need; pinned: of each
    feed-forward, how many of its first clusters stay; held: how many of these an accelerator always computes, so that
    they are not worth loading ahead."""

    part: Literal[0, 1]
    slots: int
    reserve: int
    clusters: int
    pinned: tuple[int, ...]
    held: int = 0

    @property
    def holds_everything(self) -> bool:
        """Whether nothing is ever evicted."""
        return self.slots >= self.clusters

    @property
    def clusters_per_ffn(self) -> int:
        """Clusters of one feed-forward."""
        return self.clusters // len(self.pinned)

    def warm(self) -> tuple[int, ...]:
        """Of each feed-forward, the first clusters behind the held ones worth loading before anybody asks, the pinned
        ones among them: of all as many, where the converter puts the hottest, as long as there are slots."""
        staying = [max(0, count - self.held) for count in self.pinned]
        counts = warm_counts(staying, self.clusters_per_ffn - self.held, self.slots - self.reserve)
        return tuple(self.held + count for count in counts)


@frozen(kw_only=True)
class WarmUp:
    """Clusters to load when nothing more urgent waits. parts: 1 triggers, 2 values, 3 both; pinned: whether they are to
    stay."""

    parts: Literal[1, 2, 3]
    ranges: tuple[range, ...]
    pinned: bool

    def __len__(self) -> int:
        """How many clusters these are."""
        return sum(map(len, self.ranges))

    def __iter__(self) -> Iterator[int]:
        """The clusters."""
        return itertools.chain.from_iterable(self.ranges)


def warm_ups(triggers: Region, values: Region) -> Iterator[WarmUp]:
    """What to load at the start, pinned clusters first. Clusters of which both parts are wanted are asked for together:
    their bytes are neighbours, and the file is read from end to end once."""
    nothing = (0,) * len(triggers.pinned)
    pinned, warm = (triggers.pinned, values.pinned), (triggers.warm(), values.warm())
    yield from _ranges(triggers.clusters_per_ffn, (nothing, nothing), pinned, pinned=True)
    behind = _behind(triggers), _behind(values)
    yield from _ranges(triggers.clusters_per_ffn, behind, warm, pinned=False)


def _behind(region: Region) -> Counts:
    """Where what is warm and not pinned begins."""
    return tuple(max(count, region.held) for count in region.pinned)


def _ranges(
    clusters: int, starts: tuple[Counts, Counts], ends: tuple[Counts, Counts], *, pinned: bool
) -> Iterator[WarmUp]:
    """Of each feed-forward, the clusters of either part from its start to its end."""
    found: dict[Literal[1, 2, 3], list[range]] = {3: [], 1: [], 2: []}
    for ffn, (start_1, start_2, end_1, end_2) in enumerate(zip(*starts, *ends, strict=True)):
        first = ffn * clusters
        both = max(start_1, start_2), min(end_1, end_2)
        found[3].append(range(first + both[0], first + both[1]))
        found[1] += [
            range(first + start_1, first + min(end_1, both[0])),
            range(first + max(start_1, both[1]), first + end_1),
        ]
        found[2] += [
            range(first + start_2, first + min(end_2, both[0])),
            range(first + max(start_2, both[1]), first + end_2),
        ]
    for parts, ranges in found.items():
        if kept := tuple(one for one in ranges if one):
            yield WarmUp(parts=parts, ranges=kept, pinned=pinned)


class Following:
    """Which entry of the plan's table of pins holds, by how many texts the steps have. A batch that flickers changes
    nothing: more texts count once there were as many for GROW_AFTER_S, fewer once there were no more for
    SHRINK_AFTER_S."""

    def __init__(self, entries: Sequence[int], texts: int) -> None:
        """entries: from how many texts on each holds, the first from 1."""
        self._entries = entries
        self.entry = self._of(texts)
        self._nearest = self.entry  # of the entries asked for since, the one nearest to that which holds
        self._since_s = 0.0

    def look(self, texts: int, now_s: float) -> bool:
        """Take a look at the number of texts, 0 while there were none. Returns whether another entry holds now."""
        asked = self._of(texts) if texts else self.entry
        goes_on = self._nearest != self.entry and (asked > self.entry) == (self._nearest > self.entry)
        if asked == self.entry or not goes_on:
            self._nearest, self._since_s = asked, now_s
            return False
        grows = asked > self.entry
        self._nearest = min(asked, self._nearest) if grows else max(asked, self._nearest)
        if now_s - self._since_s < (GROW_AFTER_S if grows else SHRINK_AFTER_S):
            return False
        self.entry = self._nearest
        return True

    def _of(self, texts: int) -> int:
        return max(n for n, least in enumerate(self._entries) if least <= max(1, texts))


class PinTrial:
    """Decide whether the plan's pins hold, by what decode steps miss. Where that is far above the plan, the pins are
    let go; after as many steps as the cache takes to follow, and as many more, they come back unless fewer are missed.
    There is one trial in a run."""

    HOLD: Final = 0
    TRIAL: Final = 1
    LET_GO: Final = 2
    PROVED: Final = 3
    STEPS: Final = 32  # that are compared
    SETTLING_STEPS: Final = 32
    MIN_GAIN: Final = 0.05

    def __init__(self, expected_rate: float, state: int = HOLD) -> None:
        """expected_rate: of what a step wants, the share that the plan expects to miss. state: what an earlier cache of
        the run left; a trial that it did not end begins again."""
        self.state = self.HOLD if state == self.TRIAL else state
        self._expected_rate = expected_rate
        self._since: Misses | None = None
        self._settled = True
        self._pinned_rate = 0.0

    @property
    def holds(self) -> bool:
        """Whether what the plan pins is to stay pinned."""
        return self.state in (self.HOLD, self.PROVED)

    def look(self, now: Misses) -> bool:
        """Take a look at the sums so far. Returns whether `holds` has changed."""
        if self.state in (self.LET_GO, self.PROVED):
            return False
        if self._since is None or now.steps < self._since.steps:  # sums of another coordinator
            self._since = now
            return False
        recent = now - self._since
        if recent.steps < (self.STEPS if self._settled else self.SETTLING_STEPS):
            return False
        self._since = now
        if not self._settled:
            self._settled = True
            return False
        if self.state == self.TRIAL:
            better = recent.rate < (1 - self.MIN_GAIN) * self._pinned_rate
            self.state = self.LET_GO if better else self.PROVED
            return not better
        if not is_far_above(recent.rate, self._expected_rate):
            return False
        self.state, self._settled, self._pinned_rate = self.TRIAL, False, recent.rate
        return True


class FreeSlots:
    """The free slots of one region, and how many the loader was granted. A byte per slot: a large model has
    millions."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self._free = bytearray()  # 1: free
        self._next = 0  # no slot below is free: what is taken comes back only with a reset
        self._left = 0  # free slots
        self._granted = 0  # since the reset

    def restart(self, free: bytearray) -> None:
        """After a reset. free: of every slot of the region 1 where no present word names it, else 0; taken over."""
        self._free = free
        self._next, self._left, self._granted = 0, free.count(1), 0

    def resize(self, slots: int, pinned: Counts) -> None:
        """The region has so many slots from now on. New ones are free; of fewer, a reset follows before any is asked
        for. A plan in which everything had a slot keeps none free: of fewer a few are."""
        more = max(0, slots - len(self._free)) if self._free else 0
        self._free += b"\1" * more
        self._left += more
        reserve = self.region.reserve or (min(FEW_FREE, slots // 64) if slots < self.region.clusters else 0)
        self.region = dataclasses.replace(self.region, slots=slots, pinned=pinned, reserve=reserve)

    def take(self, count: int) -> Iterator[int]:
        """Up to `count` free slots, the lowest first, for warming up. They count as granted at once; go through them
        before anything else is asked of this region."""
        count = min(count, self._left)
        self._left -= count
        self._granted += count
        return self._lowest(count)

    def on_the_way(self, received: int) -> int:
        """Return how many slots were granted that the loader did not have yet when it had received so many."""
        return self._granted - received

    def _lowest(self, count: int) -> Iterator[int]:
        while count:
            first = self._free.index(1, self._next)
            end = self._free.find(0, first, first + count)
            self._next = end if end >= 0 else first + count
            count -= self._next - first
            yield from range(first, self._next)

    def grant(self, free: int, waiting: int, received: int, evict: Callable[[int], array[int]]) -> Iterable[int]:
        """Slots to hand to the loader, so that it has its reserve and one for each waiting cluster.

        free, waiting, received: as the loader last said; what was granted and not received yet counts as free. Our
        own free slots go first; then `evict(n)` gives up to n more.
        """
        if self.region.holds_everything:
            return self.take(self._left)
        want = max(0, self.region.reserve + waiting - free - self.on_the_way(received))
        granted = array("I", self.take(want))
        if len(granted) < want:
            kept = [slot for slot in evict(want - len(granted)) if slot < self.region.slots]  # others are to be empty
            self._granted += len(kept)
            granted.extend(kept)
        return granted
