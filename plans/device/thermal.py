"""Temperatures of this device, and whether its system has lowered the clocks.

They are read from /sys, of which an app may see a part or nothing. Unreadable values are omitted.

    value             file                                                    readable by an Android app
    zones             class/thermal/thermal_zone*/{type, temp}                on some phones
    limits            .../trip_point_*_{type, temp}: the lowest "passive" one  the same
    battery           class/power_supply/battery/temp, or termux-battery-status   with Termux:API
    clocks            devices/system/cpu/cpu*/cpufreq/{scaling, cpuinfo}_max_freq  on most phones

Vendors choose the names of zones freely, and use degrees or thousandths. Only zones named after a processor, the skin
or the battery count; others (radio, charger, camera) are unrelated to computing.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal

from neuronpipe.protocol.frozen import frozen

SensorKind = Literal["processor", "skin", "battery"]

# Kinds of zones by patterns of their names. A zone named "soc" alone is a state of charge, not a system on a chip.
_KINDS: tuple[tuple[SensorKind, str], ...] = (
    ("skin", r"skin|shell|quiet|back.?cover"),
    ("battery", r"^batt"),
    ("processor", r"cpu|cluster|big|little|x86_pkg|coretemp|k10temp|soc.thermal|apss"),
)
# Usual limits, in effect if a zone has no lower passive trip point. Processors throttle at 95 C on most phones.
LIMIT_CELSIUS: dict[SensorKind, float] = {"processor": 90.0, "skin": 43.0, "battery": 43.0}
# A sensor is warm if it is closer than this to its limit: then `neuronpipe throttle` changes nothing.
WARM_BELOW_CELSIUS: dict[SensorKind, float] = {"processor": 8.0, "skin": 2.0, "battery": 2.0}
THOUSANDTHS_FROM = 200.0  # values from this on are thousandths of a degree
PLAUSIBLE_CELSIUS = (-20.0, 150.0)  # zones that are switched off report 0, -40000 or their largest number
# A passive trip point further below the usual limit controls something else, such as a fan's first step.
TRIP_COUNTS_WITHIN_CELSIUS = 20.0
CLOCKS_LOWERED_BELOW = 0.95  # share of the highest clocks


@frozen(kw_only=True)
class Sensor:
    """One temperature, and the limit from which on the device slows down, or should."""

    name: str
    kind: SensorKind
    celsius: float
    limit_celsius: float


@frozen(kw_only=True)
class ThermalState:
    """One reading of all sensors and clocks.

    sensors: all readable ones; the one closest to or furthest above its limit is first
    clock_share: allowed clock rates relative to the highest ones, summed over cores, 0..1; None if unreadable
    """

    sensors: tuple[Sensor, ...]
    clock_share: float | None

    @property
    def state(self) -> Literal["unknown", "cool", "warm", "hot"]:
        """Return "hot" if any sensor is at or above its limit, else "warm" if any is close to it, else "cool".

        "unknown" if no temperature can be read.
        """
        if not self.sensors:
            return "unknown"
        margins = [(sensor.kind, sensor.limit_celsius - sensor.celsius) for sensor in self.sensors]
        if any(margin <= 0 for _, margin in margins):
            return "hot"
        is_warm = any(margin < WARM_BELOW_CELSIUS[kind] for kind, margin in margins)
        return "warm" if is_warm else "cool"

    @property
    def throttled(self) -> bool:
        """Return True if the system has lowered the clocks."""
        return self.clock_share is not None and self.clock_share < CLOCKS_LOWERED_BELOW


def read_thermal_state(root: Path, battery: str = "") -> ThermalState:
    """Read the sensors and clocks.

    root: folder in place of "/", for tests
    battery: output of `termux-battery-status`, used if /sys has no battery; may be empty
    """
    sensors = [*_zones(root), *_battery(root, battery)]
    sensors.sort(key=lambda sensor: (sensor.limit_celsius - sensor.celsius, sensor.name))
    return ThermalState(sensors=tuple(sensors), clock_share=_clock_share(root))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""  # not allowed, or the sensor is asleep


def _number(path: Path) -> float | None:
    text = _text(path)
    return float(text) if re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", text) else None


def _celsius(value: float | None) -> float | None:
    """Convert degrees or thousandths to degrees; None for 0 and for what no device can have."""
    if value is None or value == 0:
        return None
    celsius = value / 1000 if abs(value) >= THOUSANDTHS_FROM else value
    return celsius if PLAUSIBLE_CELSIUS[0] < celsius < PLAUSIBLE_CELSIUS[1] else None


def _zones(root: Path) -> list[Sensor]:
    sensors = []
    for zone in sorted((root / "sys/class/thermal").glob("thermal_zone[0-9]*")):
        name = _text(zone / "type")
        kind = next((kind for kind, pattern in _KINDS if re.search(pattern, name.lower())), None)
        celsius = _celsius(_number(zone / "temp")) if kind else None
        if kind and celsius is not None:
            sensors.append(Sensor(name=name, kind=kind, celsius=celsius, limit_celsius=_limit(zone, kind)))
    return sensors


def _limit(zone: Path, kind: SensorKind) -> float:
    """Return the lowest passive trip point, at which the kernel starts to throttle, or the usual limit if that is
    lower."""
    usual = LIMIT_CELSIUS[kind]
    trips = [
        celsius
        for place in sorted(zone.glob("trip_point_[0-9]*_type"))
        if _text(place) == "passive"
        and (celsius := _celsius(_number(place.with_name(place.name.replace("_type", "_temp"))))) is not None
        and celsius > usual - TRIP_COUNTS_WITHIN_CELSIUS
    ]
    return min([*trips, usual])


def _battery(root: Path, status: str) -> list[Sensor]:
    celsius = None
    tenths = _number(root / "sys/class/power_supply/battery/temp")
    if tenths is not None:
        celsius = _celsius(tenths / 10)
    if celsius is None and status:
        try:
            celsius = _celsius(float(json.loads(status)["temperature"]))
        except (ValueError, KeyError, TypeError):
            celsius = None  # Termux:API is not installed, or answers with an error in words
    if celsius is None:
        return []
    return [Sensor(name="battery", kind="battery", celsius=celsius, limit_celsius=LIMIT_CELSIUS["battery"])]


def _clock_share(root: Path) -> float | None:
    allowed_hz = max_hz = 0.0
    for core in sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq")):
        scaling_max, hardware_max = _number(core / "scaling_max_freq"), _number(core / "cpuinfo_max_freq")
        if scaling_max is not None and hardware_max:
            allowed_hz, max_hz = allowed_hz + min(scaling_max, hardware_max), max_hz + hardware_max
    return allowed_hz / max_hz if max_hz else None
