"""Miss rates from the gaps between two uses of a cluster, which runs count.

A cluster that is used again after more steps than the cache keeps it is a miss. If `survival(t)` is the share of uses
that no use of the same cluster follows within t steps, a cache that keeps clusters for t steps misses that share, and
stores, on average, the accesses of a step times the sum of `survival` up to t (Denning and Schwartz 1972; as the
average eviction time of Hu et al., USENIX ATC 2016). Che's approximation is the same for independent uses; counted gaps
have the repetitions of real text in them.

The last use of a cluster in a run is no gap, but it is known that none came for a while. `survival` is therefore that
of Kaplan and Meier. Without it, short runs would seem to miss less than they do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Annotated, Final

from neuronpipe.plans.package.activity_profile import MAX_POINTS, Points
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.layouts.weights import MAX_SAMPLED_CLUSTERS, REUSE_BUCKETS
from neuronpipe.protocol.marks import Range

SINGLE_GAPS: Final = 8
BUCKETS_PER_OCTAVE: Final = 4
MAX_COUNT: Final = 1 << 50
MIN_SHARE_STEP = 0.005  # points of a curve are at least this share of all clusters apart


def bucket(gap: int) -> int:
    """Return the bucket of a gap of one or more steps, as np_reuse_bucket does."""
    if gap < SINGLE_GAPS:
        return gap
    octave = gap.bit_length() - 1
    return SINGLE_GAPS + BUCKETS_PER_OCTAVE * (octave - 3) + (gap >> octave - 2 & 3)


def longest_gap(number: int) -> int:
    """Return the longest gap of a bucket."""
    if number < SINGLE_GAPS:
        return number
    octave, part = divmod(number - SINGLE_GAPS, BUCKETS_PER_OCTAVE)
    return ((BUCKETS_PER_OCTAVE + part + 1) << octave + 1) - 1


@frozen(kw_only=True)
class UseGaps:
    """Uses of the sampled clusters of one part, triggers or values, in steps of one token.

    sampled: sampled clusters
    steps: counted steps
    gaps: uses by the bucket of the gap since the use before; bucket 0 counts those without one
    last_uses: last uses of runs, by the bucket of the steps that followed
    """

    sampled: Annotated[int, Range(1, MAX_SAMPLED_CLUSTERS)]
    steps: Annotated[int, Range(0, MAX_COUNT)]
    gaps: tuple[Annotated[int, Range(0, MAX_COUNT)], ...]
    last_uses: tuple[Annotated[int, Range(0, MAX_COUNT)], ...]

    def __post_init__(self) -> None:
        if not len(self.gaps) == len(self.last_uses) == REUSE_BUCKETS:
            raise ValueError(f"gaps and last_uses need {REUSE_BUCKETS} buckets each")

    @classmethod
    def of_run(cls, gaps: Sequence[int], last_steps: Iterable[int], steps: int, sampled: int) -> UseGaps:
        """Return the counts of a run.

        gaps: uses of one part by bucket, as np_reuse has them
        last_steps: for each sampled cluster the step of its last use plus 1; 0 if it was never used
        """
        last_uses = [0] * REUSE_BUCKETS
        used = [step for step in last_steps if step]
        for step in used:
            last_uses[bucket(max(used) - step)] += 1
        return cls(sampled=sampled, steps=steps, gaps=tuple(gaps), last_uses=tuple(last_uses))

    @property
    def uses(self) -> int:
        return sum(self.gaps)

    @property
    def uses_per_step(self) -> float:
        """Uses of sampled clusters in a step."""
        return self.uses / self.steps if self.steps else 0.0

    def plus(self, more: UseGaps, max_steps: int) -> UseGaps:
        """Return the counts of both, those of `self` reduced so that no more than `max_steps` steps remain of it."""
        share = min(1.0, max_steps / self.steps) if self.steps else 0.0

        def added(before: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
            return tuple(round(share * a) + b for a, b in zip(before, new, strict=True))

        return UseGaps(
            sampled=more.sampled,
            steps=round(share * self.steps) + more.steps,
            gaps=added(self.gaps, more.gaps),
            last_uses=added(self.last_uses, more.last_uses),
        )

    def survival(self) -> tuple[float, ...]:
        """Return by bucket the share of uses that no use of the same cluster follows within its longest gap."""
        remaining = sum(self.gaps[1:]) + sum(self.last_uses)
        survival, shares = 1.0, [1.0]
        remaining -= self.last_uses[0]
        for number in range(1, REUSE_BUCKETS):
            if remaining > 0:
                survival *= 1 - self.gaps[number] / remaining
            remaining -= self.gaps[number] + self.last_uses[number]
            shares.append(survival)
        return tuple(shares)

    def miss_curve(self) -> Points:
        """Return points of (share of all clusters that is resident, share of uses that miss)."""
        survival, points = self.survival(), [(0.0, 1.0)]
        stored, last_number = 0.0, max((n for n, count in enumerate(self.gaps) if count), default=0)
        for number in range(1, last_number + 1):
            length = longest_gap(number) - longest_gap(number - 1)
            # In a bucket the share falls from its first to its last gap.
            stored += self.uses_per_step * length * (survival[number - 1] + survival[number]) / 2
            share = stored / self.sampled
            if share >= 1.0:
                break
            if share - points[-1][0] >= MIN_SHARE_STEP:
                points.append((round(share, 6), round(survival[number], 6)))
        return _thinned((*points, (1.0, 0.0)))


def _thinned(points: Points) -> Points:
    """Return at most MAX_POINTS of the points, the first and the last among them."""
    every = -(-(len(points) - 1) // (MAX_POINTS - 1))
    return (*itertools.islice(points, 0, len(points) - 1, every), points[-1])
