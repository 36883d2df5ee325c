"""The activity profiles of a package: what was measured of its neurons on a text, in the manifest's `profiles` and in
activity.bin. FORMAT.md specifies both.

The manifest has one number per layer or per curve; activity.bin has the figures of each neuron. Nothing here imports
numpy, because a planner reads it in the parent of a run's processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import quoted
from neuronpipe.protocol.frozen import frozen

BATCHES = (1, 2, 3, 4)
"""Numbers of tokens computed together. A batch needs a neuron if one of its tokens does."""

EDGES = (0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
"""Ends of the bins of a feed-forward's neurons, hottest first, as shares of all."""
BINS = len(EDGES) - 1

ALWAYS = 65535  # the frequency 1 in activity.bin
MAX_TEXT_TOKENS = 1 << 50
MAX_POINTS = 64

ProfileMode = Literal["exact", "predicted", "thresholded"]
ProfileSource = Literal["measured", "powerinfer"]
Unit = Literal["value", "bundle", "expert"]
Policy = Literal["clock", "lru", "lfu", "optimal"]
PROFILE_MODES: tuple[ProfileMode, ...] = get_args(ProfileMode)
PROFILE_SOURCES: tuple[ProfileSource, ...] = get_args(ProfileSource)
UNITS: tuple[Unit, ...] = get_args(Unit)
POLICIES: tuple[Policy, ...] = get_args(Policy)

Points = tuple[tuple[float, float], ...]
"""A curve, by ascending x."""


def neuron_bin_ends(neurons: int) -> tuple[int, ...]:
    """Return the ends of the bins of this number of neurons, in neurons; the first number is 0."""
    return tuple(round(edge * neurons) for edge in EDGES)


def interpolated(points: Points, x: float) -> float:
    """Return the curve at x; outside its range it is constant."""
    x = min(max(x, points[0][0]), points[-1][0])
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x <= x1:
            # Exact at x1, so that rounding gives no negative share.
            return y1 if x == x1 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


@frozen(slots=True)
class ActivityProfile:
    """Measurements in one mode.

    mode: defines when a token needs a neuron. exact: when it fires, so that its value part is read; predicted: when it
        is predicted, and then all of it is read; thresholded: when it is not silent
    source: measured by us, or the counts of another program
    text: name of the text
    curve: share of the neurons -> their share of what is needed, in the package's order if that is by frequency, else
        in the measured order; mean over feed-forwards
    wanted_by_layer: share of the chosen experts' neurons that a token needs
    reuse_by_layer: share of what a token needs that the token before needed too; empty in an imported profile, as is
        misses
    experts_by_frequency, experts_by_layer_before: in a mixture, the share of a token's experts that as many guesses
        find: the most frequent ones, and those that most often follow the experts of the layer before. Measured on the
        last quarter of the text, with counts of the rest; empty if not measured
    misses: unit of residency -> policy -> (resident share of all units, share of needed units that are absent)
    """

    mode: ProfileMode
    source: ProfileSource
    text: str
    tokens: int
    curve: Points
    wanted_by_layer: tuple[float, ...]
    reuse_by_layer: tuple[float, ...] = ()
    misses: Mapping[Unit, Mapping[Policy, Points]] | None = None
    experts_by_frequency: tuple[float, ...] = ()
    experts_by_layer_before: tuple[float, ...] = ()

    def miss_rate(self, unit: Unit, resident_share: float, policy: Policy = "clock") -> float | None:
        """Return the share of needed units that are absent if this share of all is resident; None if it was not
        measured."""
        points = (self.misses or {}).get(unit, {}).get(policy)
        return None if points is None else interpolated(points, resident_share)

    @property
    def reuse(self) -> float | None:
        """Mean of reuse_by_layer, weighted by what each layer needs; None if it was not measured."""
        total = sum(self.wanted_by_layer)
        if not self.reuse_by_layer or not total:
            return None
        return sum(a * b for a, b in zip(self.wanted_by_layer, self.reuse_by_layer, strict=True)) / total


# ---- activity.bin ------------------------------------------------------------------------------------------------
def _head_values(model: ModelSpec) -> int:
    """Return how many numbers of one profile come before those of its neurons: numbers of experts, then of bins."""
    return len(BATCHES) * model.ffns * (1 + BINS)


def activity_bytes(model: ModelSpec, profiles: int) -> int:
    """Return the size of activity.bin."""
    return 2 * profiles * (_head_values(model) + len(BATCHES) * model.ffns * model.neurons)


class Activity:
    """The content of a package's activity.bin: how often neurons and experts are needed, for each profile of its
    manifest.

    Frequencies are shares of all batches of a text, 0..1; in a mixture they include how often the expert is chosen.
    Raises ValueError if the data do not have the length that the model needs.
    """

    def __init__(self, model: ModelSpec, profiles: Sequence[ActivityProfile], data: bytes) -> None:
        if len(data) != activity_bytes(model, len(profiles)):
            raise ValueError(f"{len(data)} bytes, but {activity_bytes(model, len(profiles))} are needed")
        self._model, self._modes = model, [profile.mode for profile in profiles]
        self._data = memoryview(data).cast("H")

    def expert(self, mode: ProfileMode, batch: int, layer: int, expert: int) -> float:
        """Return how often an expert computes a batch; 1 in a dense model."""
        return self._data[self._head(mode) + self._place(batch, layer, expert)] / ALWAYS

    def bins(self, mode: ProfileMode, batch: int, layer: int, expert: int) -> tuple[float, ...]:
        """Return mean frequencies of the neurons between EDGES. The order of neurons is the same for every batch: the
        package's if that is by frequency, else the measured one, hottest first for a single token."""
        start = self._head(mode) + len(BATCHES) * self._model.ffns + self._place(batch, layer, expert) * BINS
        return tuple(value / ALWAYS for value in self._data[start : start + BINS])

    def neurons(self, mode: ProfileMode, batch: int, layer: int, expert: int) -> memoryview:
        """Return the stored frequency of each neuron, uint16: ALWAYS is 1."""
        start = len(self._modes) * _head_values(self._model)
        start += self._modes.index(mode) * len(BATCHES) * self._model.ffns * self._model.neurons
        start += self._place(batch, layer, expert) * self._model.neurons
        return self._data[start : start + self._model.neurons]

    def stored(self, mode: ProfileMode) -> tuple[bytes, bytes]:
        """Return one profile's bytes: those before the neurons of all profiles, and those of its neurons."""
        head, each = self._head(mode), len(BATCHES) * self._model.ffns * self._model.neurons
        neurons = len(self._modes) * _head_values(self._model) + self._modes.index(mode) * each
        heads = self._data[head : head + _head_values(self._model)]
        return heads.tobytes(), self._data[neurons : neurons + each].tobytes()

    def _head(self, mode: ProfileMode) -> int:
        return self._modes.index(mode) * _head_values(self._model)

    def _place(self, batch: int, layer: int, expert: int) -> int:
        return (BATCHES.index(batch) * self._model.layers + layer) * self._model.experts + expert


# ---- the manifest's section ----------------------------------------------------------------------------------------
def profiles_as_json(profiles: Sequence[ActivityProfile]) -> list[dict[str, Any]]:
    """Return the manifest's section for these profiles."""
    return [
        {name: getattr(profile, name) for name in ActivityProfile.__slots__ if getattr(profile, name) not in (None, ())}
        for profile in profiles
    ]


def parse_profiles(records: Sequence[Record], model: ModelSpec) -> tuple[ActivityProfile, ...]:
    """Parse the profiles and check them against the model. Raises UserError naming the file and the field."""
    profiles: list[ActivityProfile] = []
    for record in records:
        profile = _parse_profile(record, model)
        if any(profile.mode == earlier.mode for earlier in profiles):
            record.fail("mode", f"{profile.mode} has a profile already")
        profiles.append(profile)
    return tuple(profiles)


def _parse_profile(record: Record, model: ModelSpec) -> ActivityProfile:
    profile = ActivityProfile(
        mode=_choice(record, "mode", PROFILE_MODES),
        source=_choice(record, "source", PROFILE_SOURCES),
        text=record.line("text"),
        tokens=record.integer("tokens", 1, MAX_TEXT_TOKENS),
        curve=_parse_points(record, "curve"),
        wanted_by_layer=record.shares("wanted_by_layer", model.layers),
        reuse_by_layer=_optional_shares(record, "reuse_by_layer", model),
        misses=_parse_misses(record.record("misses")) if record.has("misses") else None,
        experts_by_frequency=_optional_shares(record, "experts_by_frequency", model),
        experts_by_layer_before=_optional_shares(record, "experts_by_layer_before", model),
    )
    record.finish()
    if len(profile.experts_by_frequency) != len(profile.experts_by_layer_before):
        record.fail("experts_by_layer_before", "expected together with experts_by_frequency")
    if profile.curve[0] != (0, 0) or profile.curve[-1] != (1, 1):
        record.fail("curve", "expected points from [0, 0] to [1, 1]")
    return profile


def _optional_shares(record: Record, name: str, model: ModelSpec) -> tuple[float, ...]:
    return record.shares(name, model.layers) if record.has(name) else ()


def _choice(record: Record, name: str, choices: tuple[Any, ...]) -> Any:
    return record.choice(name, *choices)


def _parse_misses(record: Record) -> dict[Unit, dict[Policy, Points]]:
    misses: dict[Unit, dict[Policy, Points]] = {}
    for unit in UNITS:
        if record.has(unit):
            policies = record.record(unit)
            misses[unit] = {policy: _parse_points(policies, policy) for policy in POLICIES}
            policies.finish()
    record.finish()
    return misses


def _parse_points(record: Record, name: str) -> Points:
    points = record.items(name)
    if not 2 <= len(points) <= MAX_POINTS:
        record.fail(name, f"expected between 2 and {MAX_POINTS} points")
    for point in points:
        if not (isinstance(point, list) and len(point) == 2 and all(_is_share(value) for value in point)):
            record.fail(name, f"{quoted(point)}: expected two numbers between 0 and 1")
    if any(a[0] >= b[0] for a, b in itertools.pairwise(points)):
        record.fail(name, "expected points by ascending share")
    return tuple((float(x), float(y)) for x, y in points)


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
