"""What decode steps miss beside what their plan expects: the counts, and whether a run is far off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.layouts.run import BOARD_MISSES

FAR_RATIO: Final = 1.5
FAR_DIFFERENCE: Final = 0.1


@frozen(kw_only=True)
class Misses:
    """Sums over decode steps: how many, the cluster parts that they wanted, and those that were not in memory."""

    steps: float = 0
    wanted: float = 0
    missed: float = 0

    @property
    def rate(self) -> float:
        """The share of what was wanted that was missed, 0 to 1."""
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
    """The sums over a run's decode steps, and those over its last ones."""

    RECENT_STEPS: Final = 64

    def __init__(self) -> None:
        self._total = self._since = Misses()
        self.recent = Misses()  # of the last whole RECENT_STEPS

    def add(self, step: Misses) -> Misses:
        """Add a step. Returns the sums over all."""
        self._total += step
        if (recent := self._total - self._since).steps >= self.RECENT_STEPS:
            self.recent, self._since = recent, self._total
        return self._total


def misses_of(counters: Mapping[str, float], *, whole: bool) -> Misses:
    """Return what steps with these counters, wanted and missed, as plans count it, taken as one step.

    Triggers are looked for ahead of computing, where anything is: with a predictor those of clusters it names, else all
    of a layer. Those that nobody looked for ahead are taken to miss as often. whole: a value part comes with its
    trigger part, so that triggers speak for both; otherwise those of clusters that fired count as well, when computing
    comes to them.
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
    """Return whether a miss rate is so far above the plan's that the plan does not describe the run."""
    return rate > FAR_RATIO * expected_rate and rate > expected_rate + FAR_DIFFERENCE
