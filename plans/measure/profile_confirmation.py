"""Correction of a device profile by later measurements that are faster.

Load only makes a machine look slower, and that of another virtual machine is invisible, so a profile may be too slow.
Later starts on a quiet machine measure some of its kernels briefly. If they are clearly faster, the faster figures
replace the profile's.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from neuronpipe.plans.device.device import FlashCurve
from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.device.profile import DeviceProfile

CLEARLY = 1.2  # minimum of the median speed ratio of the common figures
SPEEDS = ("dram", "decode", "panels", "reused")


def with_better(profile: DeviceProfile, later: DeviceProfile | None) -> DeviceProfile:
    """Return the profile, with the faster of both figures if `later` is newer and clearly faster."""
    if later is None or later.taken_at <= profile.taken_at or (ratio_of(later, profile) or 0.0) < CLEARLY:
        return profile
    better: dict[str, Any] = {name: _merged(getattr(profile, name), getattr(later, name)) for name in SPEEDS}
    return dataclasses.replace(profile, busy=later.busy, **better)


def ratio_of(later: DeviceProfile, profile: DeviceProfile) -> float | None:
    """Return the median speed ratio of memory and kernels, later over earlier; None without a common figure."""
    ratios = [
        fast.median / slow.median
        for name in SPEEDS
        for key, fast in _by_key(getattr(later, name)).items()
        if (slow := _by_key(getattr(profile, name)).get(key)) is not None
    ]
    return statistics.median(ratios) if ratios else None


def faster_curve(curve: FlashCurve | None, later: FlashCurve | None) -> FlashCurve | None:
    """Return the later curve if it is clearly faster than `curve`, else `curve`. If only one exists, return that.

    The spread of the result is at least the distance between both, since some disks change within minutes.
    """
    if curve is None or later is None:
        return curve or later
    profile_speeds = {(point.request_bytes, point.depth): point.bytes_per_s for point in curve.points}
    pairs = [(point, profile_speeds.get((point.request_bytes, point.depth))) for point in later.points]
    ratios = [point.bytes_per_s / speed for point, speed in pairs if speed is not None]
    if not ratios:
        return curve
    ratio = statistics.median(ratios)
    chosen = later if ratio >= CLEARLY else curve
    return dataclasses.replace(chosen, spread=max(chosen.spread, max(ratio, 1 / ratio) - 1))


def _merged(points: tuple[Any, ...], later: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the points of both, and of two points with the same conditions the faster one."""
    best = {_key(point): point for point in points}
    for point in later:
        current = best.get(_key(point))
        if current is None or _figure(current).median < _figure(point).median:
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
