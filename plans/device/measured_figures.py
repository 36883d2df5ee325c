"""Measured figures: what repetitions come to, and what lies between the points that were measured."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from neuronpipe.protocol.frozen import frozen

Case = TypeVar("Case")

MIN_FIGURE = 1e-9
MAX_FIGURE = 1e15  # bytes or weights a second, or microseconds: beyond what any machine has
MAX_SPREAD = 10.0


@frozen(kw_only=True)
class Figure:
    """Some repetitions of one measurement. spread: how far they typically lie from their median, as a share of it."""

    median: float
    spread: float

    def __post_init__(self) -> None:
        if not MIN_FIGURE <= self.median <= MAX_FIGURE:
            raise ValueError(f"a median of {self.median:g} is outside {MIN_FIGURE:g}..{MAX_FIGURE:g}")
        if not 0 <= self.spread <= MAX_SPREAD:
            raise ValueError(f"a spread of {self.spread:g} is outside 0..{MAX_SPREAD:g}")

    @classmethod
    def of(cls, repetitions: Sequence[float]) -> Figure:
        """The figure of these repetitions, in their unit."""
        return cls(median=statistics.median(repetitions), spread=round(min(MAX_SPREAD, spread_of(repetitions)), 4))


def spread_of(repetitions: Sequence[float]) -> float:
    """How far repetitions typically lie from their median, as a share of it; a single bad one does not count."""
    middle = statistics.median(repetitions)
    return statistics.median([abs(one - middle) for one in repetitions]) / middle


def measure_in_turns(cases: Sequence[Case], measure: Callable[[Case], float], rounds: int) -> dict[Case, Figure]:
    """Every case `rounds` times, all cases by turns, so that what disturbs one repetition disturbs few of another."""
    repetitions: dict[Case, list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            repetitions[case].append(measure(case))
    return {case: Figure.of(measured) for case, measured in repetitions.items()}


def interpolate(measured: Mapping[float, float], wanted: float) -> float:
    """The value at `wanted`: a line on logarithmic scales between the positions measured, flat beyond them."""
    line = sorted((math.log(position), math.log(value)) for position, value in measured.items())
    place = line[0][0] if wanted <= 0 else min(max(math.log(wanted), line[0][0]), line[-1][0])
    for (x0, y0), (x1, y1) in itertools.pairwise(line):
        if x0 <= place <= x1:
            return math.exp(y0 + (y1 - y0) * (place - x0) / (x1 - x0))
    return math.exp(line[0][1])


def interpolate_all(measured: Iterable[tuple[Sequence[float], float]], wanted: Sequence[float]) -> float:
    """The same over several positions, of (positions, value): between the values that the others give at each measured
    first position."""
    by_first: dict[float, list[tuple[Sequence[float], float]]] = {}
    for positions, value in measured:
        by_first.setdefault(positions[0], []).append((positions[1:], value))
    rest = wanted[1:]
    return interpolate(
        {first: interpolate_all(others, rest) if rest else others[0][1] for first, others in by_first.items()},
        wanted[0],
    )
