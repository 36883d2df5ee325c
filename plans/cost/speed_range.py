"""Ranges of expected speeds, from the spread of the facts that they depend on.

A range is meant to contain four of five runs. Each group of facts is moved to its slow and to its fast end, while the
other groups keep their medians. The logarithms of the changes add in quadrature, since groups vary independently.

    group              moved by
    memory, kernels    the spread of each figure, but at least what starts of a quiet machine differ by
    flash              the same
    steps, reads       the same; if no run was measured, the range of what other machines were measured at
    misses             the error of assumed misses, if they are assumed: half the misses are as flash twice as fast
    cost model         the error of the model on a machine with a new device profile
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from neuronpipe.plans.cost.token_time import Measurements
from neuronpipe.plans.cost.work_cost import ASSUMED_STEP_FACTOR, ASSUMED_STEP_FACTOR_OF_ONE
from neuronpipe.plans.device.device import FlashCurve, MemorySpeed
from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.device.measured_points import ReadDelay, ReadFactor
from neuronpipe.plans.device.profile import LIMITS, DeviceProfile
from neuronpipe.plans.number_format import show_range
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Mode, SpeedRange
from neuronpipe.protocol.frozen import frozen

Points = TypeVar("Points", bound=tuple[Any, ...])
Speeds = Mapping[str, float | None]

# Minimum of a spread. Measurements differ by more than the repetitions of one: six brief ones within a minute differed
# from their median by up to 12 % (kernels) and 17 % (flash), and of two device profiles in a row four of five kernels
# by up to 5 %.
MIN_BRIEF_SPREAD, MIN_SPREAD, MIN_FLASH_SPREAD = 0.1, 0.05, 0.15
MAX_SPREAD = 1.0  # a figure is moved by a factor of two at most
# Of steps and reads that were assumed: time of a step relative to its kernels, delay and processor time of a read
# (plans/measure/DECISIONS.md).
STEP_FACTOR_ENDS = (1.1, 1.39)
STEP_FACTOR_ENDS_OF_ONE = (1.0, 1.2)  # with one worker; no step is shorter than its kernels
READ_DELAY_ENDS_US = (140.0, 300.0)
READ_FACTOR_ENDS = (1.0, 3.0)
# Assumed misses were 14 % below to 14 % above those of twelve runs (tests/bench/results, planned right after a clone);
# with a new profile 17 of 21 runs were within 10 % of their plan.
ASSUMED_MISSES_SPREAD = 0.2
MODEL_SPREAD = 0.08
SHOWN_GROUPS = 2  # in the reason
SPEEDS = ("dram", "decode", "panels", "reused")
TIMES_OF_RUNS = ("steps", "barriers", "messages")
MOVED_FIELDS = {"bytes_per_s", "token_weights_per_s", "cpu_us", "factor", "us", "step_us", "between_us"}
"""Fields that are moved. The time of the kernels of a step is not: it is what the step's time is relative to."""


@frozen(kw_only=True)
class FactGroup:
    """Facts that vary together: all measurements with these facts at their slow end, and at their fast end.

    name: for people
    """

    name: str
    slow: Measurements
    fast: Measurements


@frozen(kw_only=True)
class Widening:
    """The change of a speed by a group of facts, as non-negative logarithms of factors."""

    name: str
    below: float
    above: float


def speed_ranges(
    evaluate: Callable[[Measurements], Speeds], measured: Measurements, *, are_misses_assumed: bool
) -> dict[str, tuple[SpeedRange, list[Widening]]]:
    """Return the range of each speed that `evaluate` expects, and what widens it, most first.

    evaluate: returns expected speeds by name; None for a speed that cannot be expected
    measured: the measurements at their medians
    are_misses_assumed: no activity profile of the package has measured the misses
    """
    medians = {name: speed for name, speed in evaluate(measured).items() if speed}
    widenings: dict[str, list[Widening]] = {name: [] for name in medians}
    for group in fact_groups(measured, are_misses_assumed=are_misses_assumed):
        slow, fast = evaluate(group.slow), evaluate(group.fast)
        for name, median in medians.items():
            below, above = (abs(math.log((speeds[name] or median) / median)) for speeds in (slow, fast))
            widenings[name].append(Widening(name=group.name, below=below, above=above))
    ranges = {}
    for name, median in medians.items():
        parts = [*widenings[name], Widening(name="the cost model", below=MODEL_SPREAD, above=MODEL_SPREAD)]
        low = median * math.exp(-math.hypot(*(part.below for part in parts)))
        high = median * math.exp(math.hypot(*(part.above for part in parts)))
        parts.sort(key=lambda part: -max(part.below, part.above))
        ranges[name] = SpeedRange(low=round(low, 3), high=round(high, 3)), parts
    return ranges


def range_reason(speeds: SpeedRange, widenings: Iterable[Widening], *, is_brief: bool) -> str:
    """Return a sentence on why the range of tokens/s is as wide as it is, and what narrows it.

    is_brief: no run on this device was measured
    """
    widest = ", ".join(
        f"{part.name} by {math.expm1(max(part.below, part.above)):.0%}" for part in list(widenings)[:SHOWN_GROUPS]
    )
    advice = "; this device was measured briefly, and `neuronpipe profile device` narrows the range" if is_brief else ""
    return (
        f"four of five runs should reach {show_range(speeds.low, speeds.high)} tokens/s: {widest} may change it{advice}"
    )


def are_misses_assumed(manifest: Manifest, mode: Mode, *, all_resident: bool) -> bool:
    """Return True if the misses of a plan come from other models.

    all_resident: every cluster has a slot, so that nothing is missed
    """
    profile = manifest.profile(mode) or manifest.profile("exact")
    return not all_resident and (profile is None or not profile.misses)


def is_brief(measured: Measurements) -> bool:
    """Return True if no run was measured on the device, as at a start."""
    profile = measured[2]
    return profile is None or not profile.steps


def fact_groups(measured: Measurements, *, are_misses_assumed: bool) -> Iterator[FactGroup]:
    """Yield the groups of the facts that were measured or assumed."""
    curve, speed, profile = measured
    spread = MIN_BRIEF_SPREAD if is_brief(measured) else MIN_SPREAD
    if speed is not None or profile is not None:
        slow, fast = ((curve, _speed(speed, spread, sign), _kernels(profile, spread, sign)) for sign in (-1, 1))
        yield FactGroup(name="the speed of memory and kernels", slow=slow, fast=fast)
    if curve is not None:
        slow, fast = ((_curve(curve, max(curve.spread, MIN_FLASH_SPREAD), sign), speed, profile) for sign in (-1, 1))
        yield FactGroup(name="the speed of flash", slow=slow, fast=fast)
        if are_misses_assumed:
            slow, fast = ((_curve(curve, ASSUMED_MISSES_SPREAD, sign), speed, profile) for sign in (-1, 1))
            yield FactGroup(name="the assumed misses", slow=slow, fast=fast)
    if profile is None:
        return
    if profile.steps:
        slow, fast = ((curve, speed, _moved(profile, TIMES_OF_RUNS, spread, sign)) for sign in (-1, 1))
        yield FactGroup(name="the time of a step", slow=slow, fast=fast)
    elif profile.decode:
        yield _assumed_steps(curve, speed, profile)
    if curve is not None:
        yield _reads(curve, speed, profile, spread)


def _assumed_steps(curve: FlashCurve | None, speed: MemorySpeed | None, profile: DeviceProfile) -> FactGroup:
    """Return the group of assumed steps. Slower steps are as slower kernels and memory, which the factor multiplies."""

    def end(number: int) -> DeviceProfile:
        of_several = ASSUMED_STEP_FACTOR / STEP_FACTOR_ENDS[number]
        of_one = ASSUMED_STEP_FACTOR_OF_ONE / STEP_FACTOR_ENDS_OF_ONE[number]
        return _scaled(profile, ("dram", "decode"), lambda point, _: of_one if point.workers == 1 else of_several)

    return FactGroup(name="the assumed time of a step", slow=(curve, speed, end(1)), fast=(curve, speed, end(0)))


def _reads(curve: FlashCurve, speed: MemorySpeed | None, profile: DeviceProfile, spread: float) -> FactGroup:
    """Return the group of the processor times and delays of reads."""
    if profile.steps:
        slow, fast = ((curve, speed, _read_costs(profile, spread, sign)) for sign in (-1, 1))
        return FactGroup(name="the costs of reads", slow=slow, fast=fast)

    def assumed(end: int) -> DeviceProfile:
        delay, factor = (Figure(median=ends[end], spread=0.0) for ends in (READ_DELAY_ENDS_US, READ_FACTOR_ENDS))
        delays = tuple(ReadDelay(together=together, workers=1, us=delay) for together in (False, True))
        return dataclasses.replace(profile, read_delays=delays, read_factors=(ReadFactor(workers=1, factor=factor),))

    slow, fast = (curve, speed, assumed(1)), (curve, speed, assumed(0))
    return FactGroup(name="the assumed costs of reads", slow=slow, fast=fast)


def _curve(curve: FlashCurve, spread: float, sign: int) -> FlashCurve:
    factor = _factor(spread, sign)
    points = (dataclasses.replace(point, bytes_per_s=factor * point.bytes_per_s) for point in curve.points)
    return dataclasses.replace(curve, points=tuple(points))


def _speed(speed: MemorySpeed | None, spread: float, sign: int) -> MemorySpeed | None:
    if speed is None:
        return None
    factor = _factor(max(spread, speed.spread), sign)
    return dataclasses.replace(
        speed,
        one_thread_bytes_per_s=factor * speed.one_thread_bytes_per_s,
        sequential_bytes_per_s=factor * speed.sequential_bytes_per_s,
        pieces=tuple(dataclasses.replace(point, bytes_per_s=factor * point.bytes_per_s) for point in speed.pieces),
    )


def _kernels(profile: DeviceProfile | None, spread: float, sign: int) -> DeviceProfile | None:
    return None if profile is None else _moved(profile, SPEEDS, spread, sign)


def _read_costs(profile: DeviceProfile, spread: float, sign: int) -> DeviceProfile:
    moved = _moved(profile, ("read_delays", "read_factors"), spread, sign)
    if moved.flash is None:
        return moved
    costs = _scaled_points(moved.flash.costs, lambda _, figure: _factor(max(spread, figure.spread), -sign))
    return dataclasses.replace(moved, flash=dataclasses.replace(moved.flash, costs=costs))


def _moved(profile: DeviceProfile, lists: Iterable[str], spread: float, sign: int) -> DeviceProfile:
    """Return the profile with the figures of these lists moved by their spread, or by `spread` if that is larger.

    sign: 1 to the fast end, -1 to the slow one
    """
    speeds = [name for name in lists if name in SPEEDS]
    times = [name for name in lists if name not in SPEEDS]
    profile = _scaled(profile, speeds, lambda _, figure: _factor(max(spread, figure.spread), sign))
    return _scaled(profile, times, lambda _, figure: _factor(max(spread, figure.spread), -sign))


def _scaled(profile: DeviceProfile, lists: Iterable[str], factor: Callable[[Any, Figure], float]) -> DeviceProfile:
    changes: dict[str, Any] = {name: _scaled_points(getattr(profile, name), factor) for name in lists}
    return dataclasses.replace(profile, **changes)


def _scaled_points(points: Points, factor: Callable[[Any, Figure], float]) -> Points:
    """Return the points with each figure times its factor, within the plausible range."""
    scaled = []
    for point in points:
        changes = {}
        for field in dataclasses.fields(point):
            figure = getattr(point, field.name)
            if isinstance(figure, Figure) and field.name in MOVED_FIELDS:
                minimum, maximum = next(ends for ending, ends in LIMITS.items() if field.name.endswith(ending))
                median = min(max(factor(point, figure) * figure.median, minimum), maximum)
                changes[field.name] = Figure(median=median, spread=figure.spread)
        scaled.append(dataclasses.replace(point, **changes))
    return tuple(scaled)  # type: ignore[return-value]


def _factor(spread: float, sign: int) -> float:
    return float((1 + min(spread, MAX_SPREAD)) ** sign)
