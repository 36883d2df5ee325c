"""A device profile beside what later starts measured: the better figures count.

Other programs can only make a machine look slow, and a minute in which they did so may look quiet: another virtual
machine's work shows nowhere. So a profile does not decide for good. The first starts after it measure the same kernels
briefly, on a quiet machine, and where those are clearly faster their figures take the place of the profile's.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from neuronpipe.plans.device.device import FlashCurve
from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.device.profile import DeviceProfile

CLEARLY = 1.2  # times as fast, in the median of what both have
SPEEDS = ("dram", "decode", "panels", "reused")


def with_better(profile: DeviceProfile, later: DeviceProfile | None) -> DeviceProfile:
    """Return the profile with the figures of a later, brief one that was measured after it and is clearly faster."""
    if later is None or later.taken_at <= profile.taken_at or (ratio_of(later, profile) or 0.0) < CLEARLY:
        return profile
    better: dict[str, Any] = {name: _merged(getattr(profile, name), getattr(later, name)) for name in SPEEDS}
    return dataclasses.replace(profile, busy=later.busy, **better)


def ratio_of(later: DeviceProfile, profile: DeviceProfile) -> float | None:
    """Return how many times as fast memory and kernels are in the later one; None where they have nothing in common."""
    ratios = [
        fast.median / slow.median
        for name in SPEEDS
        for key, fast in _by_key(getattr(later, name)).items()
        if (slow := _by_key(getattr(profile, name)).get(key)) is not None
    ]
    return statistics.median(ratios) if ratios else None


def faster_curve(curve: FlashCurve | None, later: FlashCurve | None) -> FlashCurve | None:
    """Return the later curve where it is clearly faster than the profile's, else the profile's."""
    if curve is None or later is None:
        return curve or later
    known = {(point.request_bytes, point.depth): point.bytes_per_s for point in curve.points}
    both = [(point, known.get((point.request_bytes, point.depth))) for point in later.points]
    ratios = [point.bytes_per_s / speed for point, speed in both if speed is not None]
    return later if ratios and statistics.median(ratios) >= CLEARLY else curve


def _merged(points: tuple[Any, ...], later: tuple[Any, ...]) -> tuple[Any, ...]:
    """The points of both; of one that both have, the faster."""
    best = {_key(point): point for point in points}
    for point in later:
        known = best.get(_key(point))
        if known is None or _figure(known).median < _figure(point).median:
            best[_key(point)] = point
    return tuple(best.values())


def _by_key(points: tuple[Any, ...]) -> dict[tuple[Any, ...], Figure]:
    return {_key(point): _figure(point) for point in points}


def _key(point: Any) -> tuple[Any, ...]:
    values = (getattr(point, field.name) for field in dataclasses.fields(point))
    return tuple(value for value in values if not isinstance(value, Figure))


def _figure(point: Any) -> Figure:
    values = (getattr(point, field.name) for field in dataclasses.fields(point))
    return next(value for value in values if isinstance(value, Figure))
