"""The activity profiles of a package: which neurons are needed how often, measured on a text.

The manifest's `profiles` has curves and figures of layers; activity.bin has the figures of each neuron. FORMAT.md
specifies both. This module does not import numpy, because a planner reads profiles in the parent of a run's processes.
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
"""The measured batch sizes in tokens. A batch needs a neuron if one of its tokens does."""

EDGES = (0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
"""Bounds of the bins of a feed-forward's neurons by descending frequency, as shares of the neurons."""
BINS = len(EDGES) - 1

ALWAYS = 65535  # the frequency 1 in activity.bin
MAX_TEXT_TOKENS = 1 << 50
MAX_POINTS = 64

ProfileMode = Literal["exact", "predicted", "thresholded"]
ProfileSource = Literal["measured", "powerinfer", "counted"]
Unit = Literal["value", "bundle", "expert"]
Policy = Literal["clock", "lru", "lfu", "optimal"]
PROFILE_MODES: tuple[ProfileMode, ...] = get_args(ProfileMode)
PROFILE_SOURCES: tuple[ProfileSource, ...] = ("measured", "powerinfer")
"""The sources that a package may state; what runs have counted is no part of a package."""
UNITS: tuple[Unit, ...] = get_args(Unit)
POLICIES: tuple[Policy, ...] = get_args(Policy)

Points = tuple[tuple[float, float], ...]
"""The points (x, y) of a curve, by ascending x."""


def neuron_bin_ends(neurons: int) -> tuple[int, ...]:
    """Return EDGES as numbers of neurons, for a feed-forward with `neurons` neurons."""
    return tuple(round(edge * neurons) for edge in EDGES)


def interpolated(points: Points, x: float) -> float:
    """Return y of the curve at x; outside its range the curve is constant."""
    x = min(max(x, points[0][0]), points[-1][0])
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x <= x1:
            # Exact at x1, so that rounding gives no negative share.
            return y1 if x == x1 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


@frozen(slots=True)
class ActivityProfile:
    """Measurements in one mode.

    mode: defines when a token needs a neuron. exact: when the neuron fires, so that its value part is read; predicted:
        when it is predicted, so that both parts are read; thresholded: when it is not below the threshold
    source: measured by `profile`, powerinfer: imported counts, or counted by runs (plans/history)
    text: name of the text
    tokens: number of tokens of the text
    curve: share of the neurons -> their share of the needed neurons, over all feed-forwards. Neurons are in the
        package's order if that is by frequency, else most frequent first
    wanted_by_layer: mean share of the neurons of a token's experts that the token needs
    reuse_by_layer: share of a token's needed neurons that the token before needed too; empty in an imported profile
    misses: unit of residency -> policy -> (resident share of all units, share of the needed units that are absent);
        None in an imported profile
    experts_by_frequency: in a mixture, the share of a token's experts that are predicted, if the prediction is always
        the most frequent experts, as many as a token has. Measured on the last quarter of the text, with counts of the
        rest; empty if it was not measured
    experts_by_layer_before: the same for the experts that most often follow the token's experts of the layer before
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
        """Return the share of needed units that are absent if `resident_share` of all units is resident; None if it was
        not measured."""
        points = (self.misses or {}).get(unit, {}).get(policy)
        return None if points is None else interpolated(points, resident_share)

    @property
    def reuse(self) -> float | None:
        """Mean of reuse_by_layer, weighted by wanted_by_layer; None if it was not measured or all weights are 0."""
        total = sum(self.wanted_by_layer)
        if not self.reuse_by_layer or not total:
            return None
        return sum(a * b for a, b in zip(self.wanted_by_layer, self.reuse_by_layer, strict=True)) / total


# ---- activity.bin ------------------------------------------------------------------------------------------------
def _head_values(model: ModelSpec) -> int:
    """Return how many numbers a profile has for experts and bins; activity.bin stores them before those of neurons."""
    return len(BATCHES) * model.ffns * (1 + BINS)


def activity_bytes(model: ModelSpec, profiles: int) -> int:
    """Return the size of activity.bin. profiles: number of profiles."""
    return 2 * profiles * (_head_values(model) + len(BATCHES) * model.ffns * model.neurons)


class Activity:
    """The content of activity.bin: how often neurons and experts are needed, for each profile of the manifest.

    Frequencies are shares of all batches of a text, 0..1; in a mixture, batches that do not choose the expert count
    too. Raises ValueError if `data` has not the length that model and profiles need.
    """

    def __init__(self, model: ModelSpec, profiles: Sequence[ActivityProfile], data: bytes) -> None:
        if len(data) != activity_bytes(model, len(profiles)):
            raise ValueError(f"{len(data)} bytes, but {activity_bytes(model, len(profiles))} are needed")
        self._model, self._modes = model, [profile.mode for profile in profiles]
        self._data = memoryview(data).cast("H")

    def expert(self, mode: ProfileMode, batch: int, layer: int, expert: int) -> float:
        """Return the share of batches of size `batch` that the expert computes; 1 in a dense model."""
        return self._data[self._head(mode) + self._place(batch, layer, expert)] / ALWAYS

    def bins(self, mode: ProfileMode, batch: int, layer: int, expert: int) -> tuple[float, ...]:
        """Return the mean frequency of the neurons in each bin. Neurons have the same order for every batch size: the
        package's if that is by frequency, else by descending frequency for single tokens."""
        start = self._head(mode) + len(BATCHES) * self._model.ffns + self._place(batch, layer, expert) * BINS
        return tuple(value / ALWAYS for value in self._data[start : start + BINS])

    def neurons(self, mode: ProfileMode, batch: int, layer: int, expert: int) -> memoryview:
        """Return the frequency of each neuron as uint16, in units of 1 / ALWAYS."""
        start = len(self._modes) * _head_values(self._model)
        start += self._modes.index(mode) * len(BATCHES) * self._model.ffns * self._model.neurons
        start += self._place(batch, layer, expert) * self._model.neurons
        return self._data[start : start + self._model.neurons]

    def stored(self, mode: ProfileMode) -> tuple[bytes, bytes]:
        """Return the bytes of a profile: those of experts and bins, and those of neurons."""
        head, each = self._head(mode), len(BATCHES) * self._model.ffns * self._model.neurons
        neurons = len(self._modes) * _head_values(self._model) + self._modes.index(mode) * each
        heads = self._data[head : head + _head_values(self._model)]
        return heads.tobytes(), self._data[neurons : neurons + each].tobytes()

    def _head(self, mode: ProfileMode) -> int:
        return self._modes.index(mode) * _head_values(self._model)

    def _place(self, batch: int, layer: int, expert: int) -> int:
        return BATCHES.index(batch) * self._model.ffns + self._model.first_ffns[layer] + expert


# ---- the manifest's section ----------------------------------------------------------------------------------------
def profiles_as_json(profiles: Sequence[ActivityProfile]) -> list[dict[str, Any]]:
    return [
        {name: getattr(profile, name) for name in ActivityProfile.__slots__ if getattr(profile, name) not in (None, ())}
        for profile in profiles
    ]


def parse_profiles(records: Sequence[Record], model: ModelSpec) -> tuple[ActivityProfile, ...]:
    """Return the parsed profiles. Raises UserError if they do not fit the model."""
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
