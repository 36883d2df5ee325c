"""The cache's bookkeeping, without sockets: free slots, grants, warm-up and pins.

A slot is free (in this module), granted (to the loader), occupied (a present residency entry names it), free again.
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
"""Numbers of clusters by feed-forward: the first ones of each."""
GROW_AFTER_S: Final = 0.5
SHRINK_AFTER_S: Final = 5.0
FEW_FREE: Final = 64
MAX_IDS_PER_MESSAGE: Final = 1 << 17  # half a MiB packed


def packed(ids: Iterable[int]) -> Iterator[bytes]:
    """Yield cluster or slot numbers as little-endian uint32, in pieces that fit a message each; nothing for no ids."""
    remaining = iter(ids)
    while piece := array("I", itertools.islice(remaining, MAX_IDS_PER_MESSAGE)):
        yield piece.tobytes()


@frozen(kw_only=True)
class Region:
    """The slots of one part, from the plan.

    reserve: free slots that the loader should have ahead of need
    pinned: number of first clusters that are pinned, for each feed-forward
    offloaded: number of these that an accelerator always computes, so that they are not loaded ahead
    """

    part: Literal[0, 1]
    slots: int
    reserve: int
    clusters: int
    pinned: tuple[int, ...]
    offloaded: int = 0

    @property
    def holds_everything(self) -> bool:
        """True if every cluster has a slot, so that nothing is ever evicted."""
        return self.slots >= self.clusters

    @property
    def clusters_per_ffn(self) -> int:
        return self.clusters // len(self.pinned)

    def warm(self) -> tuple[int, ...]:
        """Return by feed-forward the end of the clusters to load ahead of any request.

        The range begins after the offloaded clusters and includes the pinned ones. Every feed-forward gets equally
        many, from its beginning, where conversion puts the hottest, as far as there are slots.
        """
        pinned = [max(0, count - self.offloaded) for count in self.pinned]
        counts = warm_counts(pinned, self.clusters_per_ffn - self.offloaded, self.slots - self.reserve)
        return tuple(self.offloaded + count for count in counts)


@frozen(kw_only=True)
class WarmUp:
    """Clusters to load while nothing more urgent waits.

    parts: 1 triggers, 2 values, 3 both
    pinned: True to pin them
    """

    parts: Literal[1, 2, 3]
    ranges: tuple[range, ...]
    pinned: bool

    def __len__(self) -> int:
        return sum(map(len, self.ranges))

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self.ranges)


def warm_ups(triggers: Region, values: Region) -> Iterator[WarmUp]:
    """Yield what to load at the start, pinned clusters first.

    Clusters of which both parts are needed come as one, since their bytes are adjacent and the file is then read
    sequentially once.
    """
    nothing = (0,) * len(triggers.pinned)
    pinned, warm = (triggers.pinned, values.pinned), (triggers.warm(), values.warm())
    yield from _ranges(triggers.clusters_per_ffn, (nothing, nothing), pinned, pinned=True)
    starts = _unpinned_starts(triggers), _unpinned_starts(values)
    yield from _ranges(triggers.clusters_per_ffn, starts, warm, pinned=False)


def _unpinned_starts(region: Region) -> Counts:
    """Return by feed-forward the first cluster that is neither pinned nor offloaded."""
    return tuple(max(count, region.offloaded) for count in region.pinned)


def _ranges(
    clusters: int, starts: tuple[Counts, Counts], ends: tuple[Counts, Counts], *, pinned: bool
) -> Iterator[WarmUp]:
    """Yield the clusters of either part from its start to its end in every feed-forward, those of both parts first."""
    ranges_by_parts: dict[Literal[1, 2, 3], list[range]] = {3: [], 1: [], 2: []}
    for ffn, (start_1, start_2, end_1, end_2) in enumerate(zip(*starts, *ends, strict=True)):
        first = ffn * clusters
        shared_start, shared_end = max(start_1, start_2), min(end_1, end_2)
        ranges_by_parts[3].append(range(first + shared_start, first + shared_end))
        ranges_by_parts[1] += [
            range(first + start_1, first + min(end_1, shared_start)),
            range(first + max(start_1, shared_end), first + end_1),
        ]
        ranges_by_parts[2] += [
            range(first + start_2, first + min(end_2, shared_start)),
            range(first + max(start_2, shared_end), first + end_2),
        ]
    for parts, ranges in ranges_by_parts.items():
        if nonempty := tuple(clusters_range for clusters_range in ranges if clusters_range):
            yield WarmUp(parts=parts, ranges=nonempty, pinned=pinned)


class PinTable:
    """The current entry of the plan's table of pins, chosen by the number of sequences in a step.

    A number of sequences that fluctuates changes nothing: a larger one counts after GROW_AFTER_S, a smaller one after
    SHRINK_AFTER_S.

    entries: for each entry, the number of sequences from which on it holds; the first is 1
    """

    def __init__(self, entries: Sequence[int], sequences: int) -> None:
        self._entries = entries
        self.entry = self._entry_for(sequences)
        self._nearest = self.entry  # of the entries that all steps since `_since_s` required, the nearest to `entry`
        self._since_s = 0.0

    def update(self, sequences: int, now_s: float) -> bool:
        """Observe the number of sequences, 0 while there was no step. Return True if another entry holds now."""
        target = self._entry_for(sequences) if sequences else self.entry
        goes_on = self._nearest != self.entry and (target > self.entry) == (self._nearest > self.entry)
        if target == self.entry or not goes_on:
            self._nearest, self._since_s = target, now_s
            return False
        grows = target > self.entry
        self._nearest = min(target, self._nearest) if grows else max(target, self._nearest)
        if now_s - self._since_s < (GROW_AFTER_S if grows else SHRINK_AFTER_S):
            return False
        self.entry = self._nearest
        return True

    def _entry_for(self, sequences: int) -> int:
        return max(n for n, minimum in enumerate(self._entries) if minimum <= max(1, sequences))


class PinTrial:
    """A trial without the plan's pins, once in a run, if decode steps miss far more than the plan expects.

    The pins are released. After SETTLING_STEPS, in which the cache adapts, and STEPS more, they are restored unless the
    miss rate has fallen by MIN_GAIN.

    expected_rate: miss rate that the plan expects
    state: state of an earlier cache process of the run; an unfinished trial begins again
    """

    HOLD: Final = 0
    TRIAL: Final = 1
    LET_GO: Final = 2
    PROVED: Final = 3
    STEPS: Final = 32  # whose miss rates are compared
    SETTLING_STEPS: Final = 32
    MIN_GAIN: Final = 0.05

    def __init__(self, expected_rate: float, state: int = HOLD) -> None:
        self.state = self.HOLD if state == self.TRIAL else state
        self._expected_rate = expected_rate
        self._since: Misses | None = None
        self._settled = True
        self._pinned_rate = 0.0

    @property
    def holds(self) -> bool:
        return self.state in (self.HOLD, self.PROVED)

    def look(self, now: Misses) -> bool:
        """Observe the sums over all decode steps so far. Return True if `holds` has changed."""
        if self.state in (self.LET_GO, self.PROVED):
            return False
        if self._since is None or now.steps < self._since.steps:  # a new coordinator counts from 0
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
    """The free slots of one region, and the number granted to the loader. A slot takes one byte, since a large model
    has millions."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self._free = bytearray()  # 1: free
        self._next = 0  # no slot below this one is free, since slots become free only at a reset
        self._free_count = 0
        self._granted = 0  # since the reset

    def restart(self, free: bytearray) -> None:
        """Begin after a reset.

        free: a byte per slot, 1 if no present entry names it; the object keeps it
        """
        self._free = free
        self._next, self._free_count, self._granted = 0, free.count(1), 0

    def resize(self, slots: int, pinned: Counts) -> None:
        """Change the number of slots. New ones are free; if there are fewer, a reset must follow before the next grant.

        A region in which every cluster had a slot has no reserve; with fewer slots it gets a small one.
        """
        added = max(0, slots - len(self._free)) if self._free else 0
        self._free += b"\1" * added
        self._free_count += added
        reserve = self.region.reserve or (min(FEW_FREE, slots // 64) if slots < self.region.clusters else 0)
        self.region = dataclasses.replace(self.region, slots=slots, pinned=pinned, reserve=reserve)

    def take(self, count: int) -> Iterator[int]:
        """Return up to `count` free slots, the lowest first. They count as granted at once; exhaust the iterator before
        the next call."""
        count = min(count, self._free_count)
        self._free_count -= count
        self._granted += count
        return self._lowest(count)

    def on_the_way(self, received: int) -> int:
        """Return the number of granted slots that the loader had not received yet when it reported `received`."""
        return self._granted - received

    def _lowest(self, count: int) -> Iterator[int]:
        while count:
            first = self._free.index(1, self._next)
            end = self._free.find(0, first, first + count)
            self._next = end if end >= 0 else first + count
            count -= self._next - first
            yield from range(first, self._next)

    def grant(self, free: int, waiting: int, received: int, evict: Callable[[int], array[int]]) -> Iterable[int]:
        """Return the slots to grant, so that the loader has its reserve and one for each waiting cluster.

        free, waiting, received: counts in the loader's last message; slots that are on the way count as free. Free
        slots go first; `evict(n)` frees up to n more.
        """
        if self.region.holds_everything:
            return self.take(self._free_count)
        required = max(0, self.region.reserve + waiting - free - self.on_the_way(received))
        granted = array("I", self.take(required))
        if len(granted) < required:
            # Evicted slots beyond the end of a shrinking region stay empty.
            evicted = [slot for slot in evict(required - len(granted)) if slot < self.region.slots]
            self._granted += len(evicted)
            granted.extend(evicted)
        return granted
