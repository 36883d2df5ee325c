"""Statistics of repeated measurements, and interpolation between measured points."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from neuronpipe.protocol.frozen import frozen

Case = TypeVar("Case")

MIN_FIGURE = 1e-9
MAX_FIGURE = 1e15  # bytes or weights per second, or microseconds: more than any machine has
MAX_SPREAD = 10.0


@frozen(kw_only=True)
class Figure:
    """Median and spread of the repetitions of one measurement.

    spread: the result of `spread_of`
    """

    median: float
    spread: float

    def __post_init__(self) -> None:
        if not MIN_FIGURE <= self.median <= MAX_FIGURE:
            raise ValueError(f"a median of {self.median:g} is outside {MIN_FIGURE:g}..{MAX_FIGURE:g}")
        if not 0 <= self.spread <= MAX_SPREAD:
            raise ValueError(f"a spread of {self.spread:g} is outside 0..{MAX_SPREAD:g}")

    @classmethod
    def of(cls, repetitions: Sequence[float]) -> Figure:
        """Return the figure of these repetitions, in their unit. A larger spread than MAX_SPREAD is cut to it."""
        return cls(median=statistics.median(repetitions), spread=round(min(MAX_SPREAD, spread_of(repetitions)), 4))


def spread_of(repetitions: Sequence[float]) -> float:
    """Return the median distance of the repetitions from their median, relative to it. One outlier has no effect."""
    median = statistics.median(repetitions)
    return statistics.median([abs(repetition - median) for repetition in repetitions]) / median


def measure_in_turns(cases: Sequence[Case], measure: Callable[[Case], float], rounds: int) -> dict[Case, Figure]:
    """Measure every case `rounds` times, and return its figure.

    Cases take turns, so that one disturbance affects few repetitions of each case.
    """
    repetitions: dict[Case, list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            repetitions[case].append(measure(case))
    return {case: Figure.of(values) for case, values in repetitions.items()}


def interpolate(measured: Mapping[float, float], position: float) -> float:
    """Return the value at `position`: linear on logarithmic scales between measured positions, constant beyond them."""
    line = sorted((math.log(measured_position), math.log(value)) for measured_position, value in measured.items())
    log_position = line[0][0] if position <= 0 else min(max(math.log(position), line[0][0]), line[-1][0])
    for (x0, y0), (x1, y1) in itertools.pairwise(line):
        if x0 <= log_position <= x1:
            return math.exp(y0 + (y1 - y0) * (log_position - x0) / (x1 - x0))
    return math.exp(line[0][1])


def interpolate_all(measured: Iterable[tuple[Sequence[float], float]], position: Sequence[float]) -> float:
    """Return the value at a position of several coordinates; `measured` yields (position, value).

    Values are interpolated over all coordinates but the first, separately for each measured value of the first, and
    the results are interpolated over the first: as `interpolate` does it.
    """
    by_first: dict[float, list[tuple[Sequence[float], float]]] = {}
    for positions, value in measured:
        by_first.setdefault(positions[0], []).append((positions[1:], value))
    tail = position[1:]
    return interpolate(
        {first: interpolate_all(entries, tail) if tail else entries[0][1] for first, entries in by_first.items()},
        position[0],
    )
