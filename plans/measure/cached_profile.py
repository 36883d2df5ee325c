"""What earlier starts measured: kept in the user's cache folder, doubted when there is reason to, and then taken again.

A first start is often a busy one: a conversion writes, a compiler runs. Its figures must not stay for good. A
measurement is doubted when other programs had much of the machine, when its repetitions lie apart, when no later one
has confirmed it for a day, or when it is a month old. It is then taken again at the next start, briefly, a few times at
most until it has been a day.

    new against kept      new is beyond doubt        new is doubtful
    much better           replaces                   replaces, and stays doubtful: others can only take
    about the same        replaces a doubtful one,   as beside, but a doubtful one stays doubtful
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
SAME = 0.2  # figures this far apart still say the same
MAX_TRIES = 3  # in a row that came to nothing; then a day's rest
QUIET_LOOK_S = 0.05
RETRY_S = 60.0  # what kept the machine busy a moment ago still does
DAY_S = 24 * 3600.0
MAX_AGE_DAYS = 30


def doubt(measured: FlashCurve | DeviceProfile) -> str | None:
    """Why these figures may be wrong, in a few words; None: nothing speaks against them."""
    if measured.busy > MAX_BUSY:
        return f"other programs kept the machine {measured.busy:.0%} busy"
    if measured.spread > MAX_SPREAD:
        return f"its repetitions were {measured.spread:.0%} apart"
    return None


@frozen(kw_only=True)
class CachedMeasurement(Generic[Measured]):
    """A measurement and what became of it. Times are seconds since 1970."""

    measured: Measured
    taken_at: float  # or last confirmed
    agreed: int = 1  # measurements in a row that came to about the same
    tries: int = 0  # later ones that came to nothing
    tried_at: float = 0.0

    def due(self, now: float) -> str | None:
        """Why it is to be taken again now, in a few words; None: it holds."""
        last = max(self.taken_at, self.tried_at)
        if last <= now < last + (RETRY_S if self.tries < MAX_TRIES else DAY_S):
            return None
        age_s = now - self.taken_at
        if age_s < 0:
            return "its date lies ahead"
        if (why := doubt(self.measured)) is not None:
            return why
        if age_s > MAX_AGE_DAYS * DAY_S:
            return f"it was {age_s / DAY_S:.0f} days old"
        if self.agreed == 1 and age_s > DAY_S:
            return "nothing had confirmed it"
        return None

    def again(self, now: float) -> str:
        """Say when this is measured again, in a few words."""
        if self.due(now) is not None or (doubt(self.measured) is not None and self.tries < MAX_TRIES):
            return f"at the next start after {RETRY_S:.0f} s"
        if doubt(self.measured) is not None or self.agreed == 1:
            return "at a start after a day"
        return f"at a start after {MAX_AGE_DAYS} days"

    def followed_by(self, new: Measured, now: float) -> CachedMeasurement[Measured]:
        """What to keep after another measurement."""
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
    """Look for a moment whether other programs leave the machine alone."""
    busy = MachineLoad()
    time.sleep(QUIET_LOOK_S)
    return max(busy.processor_share(), busy.storage_share()) <= MAX_BUSY


def _figures(measured: FlashCurve | DeviceProfile) -> dict[tuple[object, ...], float]:
    """Every speed, by what it is of."""
    if isinstance(measured, FlashCurve):
        return {(point.request_bytes, point.depth): point.bytes_per_s for point in measured.points}
    return {key: figure.median for key, figure in measured.figures() if str(key[-1]).endswith("per_s")}


def _ratio(new: Measured, kept: Measured) -> float:
    """How many times as fast, by the median of the figures that both have."""
    mine, theirs = _figures(new), _figures(kept)
    return statistics.median([mine[key] / theirs[key] for key in mine.keys() & theirs.keys()] or [float("inf")])


def cached_or_measured(
    path: Path | None,
    what: str,
    kind: type[Measured],
    measure: Callable[[], Measured | None],
    say: Callable[[str], None],
    *,
    only_quiet: bool = False,
) -> Measured | None:
    """Return what is kept in the file `path`, measured when there is nothing and measured again when that is due. `say`
    gets a line when it was measured again; `what` names it there. Without a path nothing is kept. only_quiet: nothing
    is measured while other programs keep the machine busy, as where there are other figures to start with."""
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
    if (why := record.due(now)) is None or (measured := measure()) is None:
        return record.measured
    follower = record.followed_by(measured, now)
    _write(path, follower)
    say(f"measured {what} again, since {why} the last time: {_outcome(record.measured, measured, follower.measured)}")
    return follower.measured


def remeasure(
    path: Path | None,
    what: str,
    why: str,
    kind: type[Measured],
    measure: Callable[[], Measured | None],
    say: Callable[[str], None],
) -> None:
    """Measure what is kept in the file `path` again, whether it is due or not, for the reason `why`. `say` gets a line
    with what came of it."""
    if path is None or (measured := measure()) is None:
        return
    record, now = _read(path, kind), time.time()
    follower = (
        CachedMeasurement(measured=measured, taken_at=now) if record is None else record.followed_by(measured, now)
    )
    _write(path, follower)
    before = measured if record is None else record.measured
    outcome = shown(measured) if record is None else _outcome(before, measured, follower.measured)
    say(f"measured {what} again, since {why}: {outcome}")


def read_cached(path: Path | None, kind: type[Measured]) -> CachedMeasurement[Measured] | None:
    """Return what earlier starts measured and what became of it; None when there is none."""
    return None if path is None else _read(path, kind)


def keep(path: Path | None, measured: Measured) -> None:
    """Keep a thorough measurement, where there is a place, unless it is doubtful and what is kept is not."""
    if path is None:
        return
    record, now = _read(path, type(measured)), time.time()
    if record is None or doubt(measured) is None or doubt(record.measured) is not None:
        _write(path, CachedMeasurement(measured=measured, taken_at=now, agreed=2 if doubt(measured) is None else 1))
    else:
        _write(path, record.followed_by(measured, now))


def cache_profile(path: Path, profile: DeviceProfile) -> str | None:
    """Keep a device profile for later starts. Returns None, or why this one was not kept: it is doubtful, or has less
    in it (as one that was measured within a control group's limits may), and the one measured before holds."""
    before = _read_profile(path, profile.device_id, lambda line: None)
    before_holds = before is not None and _why_not(before, time.time()) is None
    if before is not None and before_holds and (why := doubt(profile) or _lacks(profile, before)) is not None:
        return why
    try:
        write_profile(path, profile)
    except (OSError, UserError) as error:
        return f"it cannot be written: {error}"
    return None


def write_profile(path: Path, profile: DeviceProfile) -> None:
    """Write a profile's file, whole or not at all. Raises OSError or UserError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as place:
        place.write_text(profile.to_json(), encoding="utf-8")


def usable_profile(
    path: Path, device_id: str, allowed: tuple[int, Kind], say: Callable[[str], None]
) -> DeviceProfile | None:
    """Return the device profile in the file `path`, if it holds for so many decode workers on cores of this kind. `say`
    gets a line when it did, and is too old now, and when the file cannot be read."""
    profile = _read_profile(path, device_id, say)
    if profile is None or (why := _why_not(profile, time.time()) or _measured_elsewhere(profile, *allowed)) is None:
        return profile
    if doubt(profile) is None:
        say(f"the device profile is not used, since {why}; `neuronpipe profile device` measures it again")
    return None


def _read_profile(path: Path, device_id: str, say: Callable[[str], None]) -> DeviceProfile | None:
    if not path.exists():
        return None
    try:
        profile = read_profile(path)
        profile.check(device_id, str(path))
    except UserError as error:
        again = "" if "`neuronpipe profile device`" in str(error) else "; `neuronpipe profile device` measures it again"
        say(f"the device profile is not used: {error}{again}")
        return None
    return profile


def _lacks(profile: DeviceProfile, before: DeviceProfile) -> str | None:
    """What of an earlier profile this one has not measured, in a few words; None: nothing."""
    if profile.decode_workers < before.decode_workers:
        return f"it has {profile.decode_workers} decode workers, and the one measured before {before.decode_workers}"
    parts = {"kernels": "decode", "memory": "dram", "steps": "steps", "flash": "flash"}
    missing = [name for name, part in parts.items() if getattr(before, part) and not getattr(profile, part)]
    return f"it lacks {' and '.join(missing)}, which the one measured before has" if missing else None


def _why_not(profile: DeviceProfile, now: float) -> str | None:
    age_s = now - profile.taken_at
    if age_s < 0:
        return "its date lies ahead"
    return f"it is {age_s / DAY_S:.0f} days old" if age_s > MAX_AGE_DAYS * DAY_S else doubt(profile)


def _measured_elsewhere(profile: DeviceProfile, workers: int, kind: Kind) -> str | None:
    """Why these figures are not those of so many workers on cores of this kind; None: they are, or are of more."""
    if profile.decode_workers < workers:
        return f"it was measured with {profile.decode_workers} decode workers, and {workers} may run here"
    fastest = max(profile.cores, key=lambda cores: cores.capacity).kind
    return None if fastest == kind else f"it was measured on {fastest} cores, and {kind} ones are allowed here"


def _outcome(
    before: FlashCurve | DeviceProfile, new: FlashCurve | DeviceProfile, after: FlashCurve | DeviceProfile
) -> str:
    if after is before:
        return f"{shown(after)} stays" + (f" ({shown(new)} now, but {why})" if (why := doubt(new)) else "")
    return f"{shown(after)} instead of {shown(before)}"


def shown(measured: FlashCurve | DeviceProfile) -> str:
    """The best figure of flash or of memory, with its unit."""
    if isinstance(measured, FlashCurve):
        best = max(point.bytes_per_s for point in measured.points)
    else:
        best = max(point.bytes_per_s.median for point in measured.dram)
    return f"{best / 1e9:.1f} GB/s" if best >= 1e9 else f"{best / 1e6:.0f} MB/s"


def _read(path: Path, kind: type[Measured]) -> CachedMeasurement[Measured] | None:
    """What an earlier probe kept; None when there is none, or none that can be understood."""
    generic: Any = CachedMeasurement
    try:
        kept: CachedMeasurement[Measured] = from_json(
            generic[kind], json_object(path.read_bytes(), str(path)), str(path)
        )
    except (OSError, UserError):
        return None
    return kept


def _write(path: Path, record: CachedMeasurement[Measured]) -> None:
    """Keep it for the next start. A home that cannot be written only costs that start a measurement."""
    with contextlib.suppress(OSError, UserError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as place:
            place.write_text(json.dumps(dataclasses.asdict(record)), encoding="utf-8")
