"""How hot this device is, and whether its system has already slowed it down. Read from /sys, which an app may see in
part or not at all; whatever cannot be read is left out.

    what              where                                                   an Android app may read it
    zones             class/thermal/thermal_zone*/{type, temp}                on some phones
    their limits      .../trip_point_*_{type, temp}: the lowest "passive" one  the same
    battery           class/power_supply/battery/temp, or termux-battery-status   with Termux:API
    clocks            devices/system/cpu/cpu*/cpufreq/{scaling, cpuinfo}_max_freq  on most phones

Vendors name zones as they like and count in degrees, tenths or thousandths. Only zones whose name says processor or
skin count: others (radio, charger, camera) say nothing about computing.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal

from neuronpipe.protocol.frozen import frozen

SensorKind = Literal["processor", "skin", "battery"]

# A zone that is called "soc" alone is no system on a chip but a state of charge, in per cent.
_KINDS: tuple[tuple[SensorKind, str], ...] = (
    ("skin", r"skin|shell|quiet|back.?cover"),
    ("battery", r"^batt"),
    ("processor", r"cpu|cluster|big|little|x86_pkg|coretemp|k10temp|soc.thermal|apss"),
)
# Where nothing says more: silicon slows itself down at 95 C on most phones; batteries and hands need much lower limits.
LIMIT_CELSIUS: dict[SensorKind, float] = {"processor": 90.0, "skin": 43.0, "battery": 43.0}
# So far below its limit, a sensor is warm: pauses neither begin nor end.
WARM_BELOW_CELSIUS: dict[SensorKind, float] = {"processor": 8.0, "skin": 2.0, "battery": 2.0}
THOUSANDTHS_FROM = 200.0
PLAUSIBLE_CELSIUS = (-20.0, 150.0)  # zones that are switched off say 0, -40000 or their largest number
# A passive trip point further below than this only steers something else, a fan's first step, say.
TRIP_COUNTS_WITHIN_CELSIUS = 20.0
CLOCKS_LOWERED_BELOW = 0.95


@frozen(kw_only=True)
class Sensor:
    """One temperature, and the one from which on the device slows down or should."""

    name: str
    kind: SensorKind
    celsius: float
    limit_celsius: float


@frozen(kw_only=True)
class ThermalState:
    """One look. sensors: what could be read, hottest first by distance from its limit. clock_share: highest clocks
    allowed now over highest clocks there are, 0..1, summed over cores; None where it cannot be read."""

    sensors: tuple[Sensor, ...]
    clock_share: float | None

    @property
    def state(self) -> Literal["unknown", "cool", "warm", "hot"]:
        """hot: a sensor is at its limit; warm: close to it; unknown: no temperature can be read."""
        if not self.sensors:
            return "unknown"
        nearest = self.sensors[0]
        margin = nearest.limit_celsius - nearest.celsius
        if margin <= 0:
            return "hot"
        return "warm" if margin < WARM_BELOW_CELSIUS[nearest.kind] else "cool"

    @property
    def throttled(self) -> bool:
        """Whether the system has lowered the clocks."""
        return self.clock_share is not None and self.clock_share < CLOCKS_LOWERED_BELOW


def read_thermal_state(root: Path, battery: str = "") -> ThermalState:
    """A look at the sensors below `root`; battery: what `termux-battery-status` printed, if it was asked."""
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
    """Degrees from degrees or thousandths; None when no device has such a temperature."""
    if value is None or value == 0:
        return None
    celsius = value / 1000 if abs(value) >= THOUSANDTHS_FROM else value
    return celsius if PLAUSIBLE_CELSIUS[0] < celsius < PLAUSIBLE_CELSIUS[1] else None


def _zones(root: Path) -> list[Sensor]:
    found = []
    for zone in sorted((root / "sys/class/thermal").glob("thermal_zone[0-9]*")):
        name = _text(zone / "type")
        kind = next((kind for kind, pattern in _KINDS if re.search(pattern, name.lower())), None)
        celsius = _celsius(_number(zone / "temp")) if kind else None
        if kind and celsius is not None:
            found.append(Sensor(name=name, kind=kind, celsius=celsius, limit_celsius=_limit(zone, kind)))
    return found


def _limit(zone: Path, kind: SensorKind) -> float:
    """The lowest passive trip point, at which the kernel begins to slow down, or the usual limit of such a sensor."""
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
    allowed = most = 0.0
    for core in sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq")):
        now, ever = _number(core / "scaling_max_freq"), _number(core / "cpuinfo_max_freq")
        if now is not None and ever:
            allowed, most = allowed + min(now, ever), most + ever
    return allowed / most if most else None
