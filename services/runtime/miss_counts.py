"""Counts of cache misses of decode steps, and the test whether a run misses far more than its plan expects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.layouts.run import BOARD_MISSES

FAR_RATIO: Final = 1.5
FAR_DIFFERENCE: Final = 0.1


@frozen(kw_only=True)
class Misses:
    """Sums over decode steps: the steps, the cluster parts that they wanted, and the parts that were not resident."""

    steps: float = 0
    wanted: float = 0
    missed: float = 0

    @property
    def rate(self) -> float:
        """The miss rate, 0 to 1."""
        return self.missed / self.wanted if self.wanted else 0.0

    def __add__(self, more: Misses) -> Misses:
        return Misses(steps=self.steps + more.steps, wanted=self.wanted + more.wanted, missed=self.missed + more.missed)

    def __sub__(self, before: Misses) -> Misses:
        return Misses(
            steps=self.steps - before.steps, wanted=self.wanted - before.wanted, missed=self.missed - before.missed
        )

    @classmethod
    def on_board(cls, words: memoryview) -> Misses:
        """Return the sums that the coordinator has written to the board."""
        return cls(**{name: int(words[n]) for n, name in enumerate(BOARD_MISSES)})


class MissesOfRun:
    """The misses of a run: of all its decode steps, and of the recent ones."""

    RECENT_STEPS: Final = 64

    def __init__(self) -> None:
        self._total = self._since = Misses()
        self.recent = Misses()  # of the last full window of RECENT_STEPS

    def add(self, step: Misses) -> Misses:
        """Add a step. Return the sums over all steps."""
        self._total += step
        if (recent := self._total - self._since).steps >= self.RECENT_STEPS:
            self.recent, self._since = recent, self._total
        return self._total


def misses_of(counters: Mapping[str, float], *, whole: bool) -> Misses:
    """Return the wanted and missed cluster parts of a step by its counters, as the cost model counts them.

    Trigger parts are looked up ahead of computing where possible: those that a predictor names, otherwise all of a
    layer. Trigger parts that were not looked up ahead count with the same miss rate.

    whole: each value part is read together with its trigger part, so that only trigger parts count; otherwise the value
        parts of clusters that fired count as well
    """

    def count(name: str) -> float:
        return counters.get(name, 0.0)

    triggers = count("trigger_clusters")
    foreseen = count("foreseen")
    missed = triggers * count("foreseen_missed") / foreseen if foreseen else count("trigger_missed")
    if whole:
        return Misses(steps=1, wanted=triggers, missed=missed)
    return Misses(steps=1, wanted=triggers + count("value_clusters"), missed=missed + count("value_missed"))


def is_far_above(rate: float, expected_rate: float) -> bool:
    """Return True if a miss rate is so far above the plan's that the plan does not describe the run."""
    return rate > FAR_RATIO * expected_rate and rate > expected_rate + FAR_DIFFERENCE
