"""Cache of measurements in the user's cache folder. They are repeated when they are doubtful or old.

During a first start the machine is often busy: a conversion writes, a compiler runs. Figures of such a time must not
stay. A measurement is doubtful if other programs used much of the machine, or if its repetitions differ. It is due
again if it is doubtful, if no second one has confirmed it within a day, or after a month. Then the next start repeats
it briefly. After MAX_TRIES fruitless repetitions in a row, the next one follows after a day.

    new against cached    new is reliable            new is doubtful
    much better           replaces                   replaces, and stays doubtful: other programs only slow down
    about the same        replaces a doubtful one,   the same, but a doubtful one stays doubtful
                          confirms another
    much worse            replaces                   is dropped
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from neuronpipe.plans.device.cores import Kind
from neuronpipe.plans.device.device import FlashCurve
from neuronpipe.plans.device.profile import DeviceProfile, read_profile
from neuronpipe.plans.measure.machine_load import MachineLoad
from neuronpipe.plans.package.atomic_output import whole_file
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.schema import from_json, json_object

Measured = TypeVar("Measured", FlashCurve, DeviceProfile)

MAX_BUSY = 0.15
MAX_SPREAD = 0.15
SAME = 0.2  # measurements whose speeds differ by a smaller share count as equal
MAX_TRIES = 3
QUIET_SAMPLE_S = 0.05
RETRY_S = 60.0  # minimum before a repetition, since the load that disturbed the last one probably continues
DAY_S = 24 * 3600.0
MAX_AGE_DAYS = 30


def doubt(measured: FlashCurve | DeviceProfile) -> str | None:
    """Return a short reason why these figures may be wrong; None if they are reliable."""
    if measured.busy > MAX_BUSY:
        return f"other programs kept the machine {measured.busy:.0%} busy"
    if measured.spread > MAX_SPREAD:
        return f"its repetitions were {measured.spread:.0%} apart"
    return None


@frozen(kw_only=True)
class CachedMeasurement(Generic[Measured]):
    """A measurement and its later confirmations. Times are seconds since 1970."""

    measured: Measured
    taken_at: float  # when it was measured, or last confirmed
    agreed: int = 1  # number of measurements in a row with about the same result
    tries: int = 0  # number of fruitless repetitions in a row
    tried_at: float = 0.0  # time of the last one

    def due(self, now: float) -> str | None:
        """Return a short reason why it must be measured again now; None if it is valid."""
        last_measured_at = max(self.taken_at, self.tried_at)
        if last_measured_at <= now < last_measured_at + (RETRY_S if self.tries < MAX_TRIES else DAY_S):
            return None
        age_s = now - self.taken_at
        if age_s < 0:
            return "its date lies ahead"
        if (reason := doubt(self.measured)) is not None:
            return reason
        if age_s > MAX_AGE_DAYS * DAY_S:
            return f"it was {age_s / DAY_S:.0f} days old"
        if self.agreed == 1 and age_s > DAY_S:
            return "nothing had confirmed it"
        return None

    def again(self, now: float) -> str:
        """Return in a few words when this is measured again."""
        if self.due(now) is not None or (doubt(self.measured) is not None and self.tries < MAX_TRIES):
            return f"at the next start after {RETRY_S:.0f} s"
        if doubt(self.measured) is not None or self.agreed == 1:
            return "at a start after a day"
        return f"at a start after {MAX_AGE_DAYS} days"

    def followed_by(self, new: Measured, now: float) -> CachedMeasurement[Measured]:
        """Return the entry to cache after a new measurement, by the table at the top of this module."""
        ratio, doubtful = _ratio(new, self.measured), doubt(new) is not None
        if 1 - SAME < ratio < 1 + SAME:
            if doubt(self.measured) is None:
                return dataclasses.replace(self, taken_at=now, agreed=self.agreed + 1, tries=0)
            if not doubtful:
                return CachedMeasurement(measured=new, taken_at=now, agreed=self.agreed + 1)
        elif ratio > 1 or not doubtful:
            return CachedMeasurement(measured=new, taken_at=now, tries=self.tries + 1 if doubtful else 0)
        return dataclasses.replace(self, tries=self.tries + 1, tried_at=now)


def is_quiet() -> bool:
    """Return True if other programs use at most MAX_BUSY of the machine, from a sample of QUIET_SAMPLE_S."""
    load = MachineLoad()
    time.sleep(QUIET_SAMPLE_S)
    return max(load.processor_share(), load.storage_share()) <= MAX_BUSY


def _figures(measured: FlashCurve | DeviceProfile) -> dict[tuple[object, ...], float]:
    """Return the speeds of a measurement, by a key that identifies a figure."""
    if isinstance(measured, FlashCurve):
        return {(point.request_bytes, point.depth): point.bytes_per_s for point in measured.points}
    return {key: figure.median for key, figure in measured.figures() if str(key[-1]).endswith("per_s")}


def _ratio(new: Measured, cached: Measured) -> float:
    """Return the median ratio of the new to the cached speeds that both have; infinity if they have none in common."""
    new_speeds, cached_speeds = _figures(new), _figures(cached)
    return statistics.median(
        [new_speeds[key] / cached_speeds[key] for key in new_speeds.keys() & cached_speeds.keys()] or [float("inf")]
    )


def cached_or_measured(
    path: Path | None,
    what: str,
    kind: type[Measured],
    measure: Callable[[], Measured | None],
    say: Callable[[str], None],
    *,
    only_quiet: bool = False,
) -> Measured | None:
    """Return the measurement in the file `path`; measure and cache it first if there is none or if it is due.

    path: None: measure every time, and cache nothing
    what: name of the measurement in the line for `say`
    measure: returns None if nothing can be measured; then the cached measurement is returned, if any
    say: receives a line when a cached measurement was repeated
    only_quiet: do not measure while other programs use the machine, as the caller has other figures
    """
    record, now = None if path is None else _read(path, kind), time.time()
    if only_quiet and (path is None or record is None or record.due(now) is not None) and not is_quiet():
        return None if record is None else record.measured
    if path is None:
        return measure()
    if record is None:
        measured = measure()
        if measured is not None:
            _write(path, CachedMeasurement(measured=measured, taken_at=now))
        return measured
    if (reason := record.due(now)) is None or (measured := measure()) is None:
        return record.measured
    follower = record.followed_by(measured, now)
    _write(path, follower)
    say(
        f"measured {what} again, since {reason} the last time: {_outcome(record.measured, measured, follower.measured)}"
    )
    return follower.measured


def remeasure(
    path: Path | None,
    what: str,
    why: str,
    kind: type[Measured],
    measure: Callable[[], Measured | None],
    say: Callable[[str], None],
) -> None:
    """Measure again for the reason `why`, whether it is due or not, and cache the result in the file `path`.

    Does nothing without a path, or if nothing can be measured. Other parameters are as in `cached_or_measured`.
    """
    if path is None or (measured := measure()) is None:
        return
    record, now = _read(path, kind), time.time()
    follower = (
        CachedMeasurement(measured=measured, taken_at=now) if record is None else record.followed_by(measured, now)
    )
    _write(path, follower)
    before = measured if record is None else record.measured
    outcome = best_speed(measured) if record is None else _outcome(before, measured, follower.measured)
    say(f"measured {what} again, since {why}: {outcome}")


def read_cached(path: Path | None, kind: type[Measured]) -> CachedMeasurement[Measured] | None:
    """Return the cached entry in the file `path`; None if there is no valid one."""
    return None if path is None else _read(path, kind)


def cache_measurement(path: Path | None, measured: Measured) -> None:
    """Cache a thorough measurement, which counts as confirmed unless it is doubtful. Does nothing without a path.

    A cached one that is not doubtful does not yield to a doubtful one unless that is faster.
    """
    if path is None:
        return
    record, now = _read(path, type(measured)), time.time()
    if record is None or doubt(measured) is None or doubt(record.measured) is not None:
        _write(path, CachedMeasurement(measured=measured, taken_at=now, agreed=2 if doubt(measured) is None else 1))
    else:
        _write(path, record.followed_by(measured, now))


def cache_profile(path: Path, profile: DeviceProfile) -> str | None:
    """Cache a device profile for later starts. Return None, or the reason why it was not cached.

    It is not cached if a valid one exists and the new one is doubtful or lacks a part of it, for example because it was
    measured within the limits of a control group.
    """
    cached = _read_profile(path, profile.device_id, lambda line: None)
    is_cached_valid = cached is not None and _reason_not_valid(cached, time.time()) is None
    if (
        cached is not None
        and is_cached_valid
        and (reason := doubt(profile) or _missing_parts(profile, cached)) is not None
    ):
        return reason
    try:
        write_profile(path, profile)
    except (OSError, UserError) as error:
        return f"it cannot be written: {error}"
    return None


def write_profile(path: Path, profile: DeviceProfile) -> None:
    """Write a profile's file atomically. Raises OSError or UserError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as place:
        place.write_text(profile.to_json(), encoding="utf-8")


def usable_profile(
    path: Path, device_id: str, allowed: tuple[int, Kind], say: Callable[[str], None]
) -> DeviceProfile | None:
    """Return the device profile in the file `path`; None if it is missing, not valid, or not comparable.

    allowed: number of decode workers that may run, and kind of the fastest core; a profile must have measured these
    say: receives a line if the file cannot be read, or if a profile that is not doubtful is not used
    """
    profile = _read_profile(path, device_id, say)
    if (
        profile is None
        or (reason := _reason_not_valid(profile, time.time()) or _reason_not_comparable(profile, *allowed)) is None
    ):
        return profile
    if doubt(profile) is None:
        say(f"the device profile is not used, since {reason}; `neuronpipe profile device` measures it again")
    return None


def _read_profile(path: Path, device_id: str, say: Callable[[str], None]) -> DeviceProfile | None:
    if not path.exists():
        return None
    try:
        profile = read_profile(path)
        profile.check(device_id, str(path))
    except UserError as error:
        advice = (
            "" if "`neuronpipe profile device`" in str(error) else "; `neuronpipe profile device` measures it again"
        )
        say(f"the device profile is not used: {error}{advice}")
        return None
    return profile


def _missing_parts(profile: DeviceProfile, cached: DeviceProfile) -> str | None:
    """Return in a few words which parts of the cached profile the new one lacks; None if it has all."""
    if profile.decode_workers < cached.decode_workers:
        return f"it has {profile.decode_workers} decode workers, and the one measured before {cached.decode_workers}"
    parts = {"kernels": "decode", "memory": "dram", "steps": "steps", "flash": "flash"}
    missing = [name for name, part in parts.items() if getattr(cached, part) and not getattr(profile, part)]
    return f"it lacks {' and '.join(missing)}, which the one measured before has" if missing else None


def _reason_not_valid(profile: DeviceProfile, now: float) -> str | None:
    age_s = now - profile.taken_at
    if age_s < 0:
        return "its date lies ahead"
    return f"it is {age_s / DAY_S:.0f} days old" if age_s > MAX_AGE_DAYS * DAY_S else doubt(profile)


def _reason_not_comparable(profile: DeviceProfile, workers: int, kind: Kind) -> str | None:
    """Return a short reason why this profile does not apply to `workers` workers on cores of this kind; None if it
    does."""
    if profile.decode_workers < workers:
        return f"it was measured with {profile.decode_workers} decode workers, and {workers} may run here"
    fastest = max(profile.cores, key=lambda cores: cores.capacity).kind
    return None if fastest == kind else f"it was measured on {fastest} cores, and {kind} ones are allowed here"


def _outcome(
    before: FlashCurve | DeviceProfile, new: FlashCurve | DeviceProfile, after: FlashCurve | DeviceProfile
) -> str:
    if after is before:
        return f"{best_speed(after)} stays" + (
            f" ({best_speed(new)} now, but {reason})" if (reason := doubt(new)) else ""
        )
    return f"{best_speed(after)} instead of {best_speed(before)}"


def best_speed(measured: FlashCurve | DeviceProfile) -> str:
    """Return the highest measured speed, of flash or of memory, with its unit."""
    if isinstance(measured, FlashCurve):
        highest = max(point.bytes_per_s for point in measured.points)
    else:
        highest = max(point.bytes_per_s.median for point in measured.dram)
    return f"{highest / 1e9:.1f} GB/s" if highest >= 1e9 else f"{highest / 1e6:.0f} MB/s"


def _read(path: Path, kind: type[Measured]) -> CachedMeasurement[Measured] | None:
    """Return the entry in the file; None if it is missing or malformed."""
    generic: Any = CachedMeasurement
    try:
        entry: CachedMeasurement[Measured] = from_json(
            generic[kind], json_object(path.read_bytes(), str(path)), str(path)
        )
    except (OSError, UserError):
        return None
    return entry


def _write(path: Path, record: CachedMeasurement[Measured]) -> None:
    """Write an entry for later starts. If that is not possible, nothing happens, and the next start measures again."""
    with contextlib.suppress(OSError, UserError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as place:
            place.write_text(json.dumps(dataclasses.asdict(record)), encoding="utf-8")
