"""Activation rates of neurons, and miss rates of a cache: measured for the package, or else assumed.

A package with an activity profile has a curve of its own: the share of activations that the hottest neurons make.
Otherwise the curve is that of a 7B dReLU model over a million tokens (Bamboo-7B, the neurons of its 32 layers together,
read off the figure that its authors published). It is no power law: some neurons are nearly always active, and the rest
has a slow tail.
"""

from __future__ import annotations

import functools
import itertools
import math
from statistics import NormalDist

from neuronpipe.plans.activity.eviction_rule import whole_experts_of_token
from neuronpipe.plans.cost.access_frequency import AccessFrequencies
from neuronpipe.plans.cost.cluster_ranking import Ranking
from neuronpipe.plans.cost.expert_misses import assumed_expert_misses
from neuronpipe.plans.package.activity_profile import ActivityProfile, Points, Policy, Unit, interpolated
from neuronpipe.plans.package.manifest import Manifest, Predictor
from neuronpipe.plans.plan.document import Mode
from neuronpipe.protocol.frozen import frozen

# (share of a layer's neurons, hottest first; share of the layer's activations that they make)
HOTTEST: Points = (
    (0.0, 0.0),
    (0.005, 0.034),
    (0.01, 0.068),
    (0.02, 0.135),
    (0.03, 0.2),
    (0.05, 0.311),
    (0.07, 0.388),
    (0.10, 0.467),
    (0.15, 0.555),
    (0.20, 0.618),
    (0.30, 0.713),
    (0.43, 0.804),
    (0.50, 0.843),
    (0.60, 0.891),
    (0.70, 0.931),
    (0.85, 0.976),
    (1.0, 1.0),
)
# Share of this model's neurons that fire: the steepest slope of a layer's curve is 6.78, of neurons that always fire.
HOTTEST_ACTIVITY = 0.1475
MIN_RATE, MAX_RATE = 1e-4, 0.9995  # of a neuron whose threshold is moved
MAX_MOVED, BISECTIONS = 6.0, 50  # of thresholds, in standard deviations
# Assumed miss rates of CLOCK by resident share, for packages without a profile. This curve is for bundles of a dense
# model, by simulation (plans/lab/simulate).
ASSUMED_MISSES: Points = ((0.0, 1.0), (0.1, 0.45), (0.25, 0.125), (0.5, 0.04), (0.75, 0.014), (1.0, 0.0))
# Assumed miss rates of bundles of experts, by resident share: by runs of a 47B from 15 to 56 %, else by simulation.
ASSUMED_ROUTED_MISSES: Points = (
    (0.0, 1.0),
    (0.032, 1.0),
    (0.05, 0.68),
    (0.08, 0.475),
    (0.15, 0.264),
    (0.266, 0.116),
    (0.3, 0.108),
    (0.43, 0.06),
    (0.56, 0.03),
    (0.66, 0.0225),
    (0.75, 0.014),
    (1.0, 0.0),
)
ASSUMED_FIRED = 0.1  # share of the neurons that fire for a token, if the package does not state it
ASSUMED_PREDICTED = 1.3  # predicted neurons per active neuron, if the predictor was never measured
UP_POSITIVE = 0.8  # dReLU: share of the neurons with an active gate whose Up is positive, too


@frozen(kw_only=True)
class ActivationRates:
    """Shares of the neurons of a chosen feed-forward whose rows a token reads: means over layers and tokens."""

    chosen: float  # share of all experts that compute a token; 1 in a dense model
    always: float = 0.0  # share of all experts that compute every token; part of `chosen`
    trigger_read: float  # the trigger row is read: that of Gate, or of Up where there is no gate
    value_read: float  # the value part is read, because the trigger is active
    down_read: float  # the Down row is read, because the whole neuron is active (dReLU: Gate and Up)
    by_frequency: bool  # the package has its hottest neurons first
    curve: Points = HOTTEST  # (share of the neurons, hottest first; share of the activations that they make)
    frequencies: AccessFrequencies | None = None  # access frequencies of clusters; None: not measured

    def activations_within(self, share: float) -> float:
        """Return the share of activations that the first `share` of the neurons make."""
        share = min(max(share, 0.0), 1.0)
        if not self.by_frequency:
            return share
        return interpolated(self.curve, share)

    def clusters_within(self, share: float, read: float, neurons: int, tokens: int = 1) -> float:
        """Return the share of a step's cluster accesses that go to the first `share` of the clusters.

        read: share of all neurons that each token reads
        neurons: neurons of a cluster
        tokens: tokens of the step, which choose independently
        """
        if not self.by_frequency:
            return share
        of_one = _clusters_along_curve(self.curve, read, neurons)
        stretches = [(x0, x1, 1 - (1 - self.chosen * accessed) ** tokens) for x0, x1, accessed in of_one]
        within = sum((min(x1, share) - x0) * accessed for x0, x1, accessed in stretches if x0 < share)
        all_accessed = sum((x1 - x0) * accessed for x0, x1, accessed in stretches)
        return within / all_accessed if all_accessed else share

    def rates_along_curve(self, read: float) -> tuple[tuple[float, float, float], ...]:
        """Return (share where it begins, share where it ends, rate) of each stretch of the curve, hottest first.

        The rate is the share of tokens that read a neuron. It is at most 1; what the curve gives the hottest neurons
        beyond that goes to colder ones.

        read: share of all neurons that a token reads
        """
        return _rates_along_curve(self.curve, read)

    def clusters_accessed(self, read: float, neurons: int) -> float:
        """Return the share of the clusters of a chosen expert that a token accesses.

        If neurons are ordered by frequency, the active ones are in fewer clusters, since neighbours have similar rates.

        read: share of the expert's neurons that the token reads
        neurons: neurons of a cluster
        """
        if not self.by_frequency or read >= 1.0:
            return touched_share(read, neurons)
        return sum((x1 - x0) * accessed for x0, x1, accessed in _clusters_along_curve(self.curve, read, neurons))

    def used_by(self, tokens: int) -> float:
        """Return the share of the neurons of a layer that at least one of `tokens` independent tokens reads."""
        return sum(
            (x1 - x0) * (1 - (1 - self.chosen * min(1.0, self.trigger_read * (y1 - y0) / (x1 - x0))) ** tokens)
            for (x0, y0), (x1, y1) in itertools.pairwise(self.curve)
        )

    @property
    def routed(self) -> float:
        """The share of the other experts that a token chooses."""
        return (self.chosen - self.always) / (1 - self.always) if self.always < 1.0 else 0.0

    def neurons_active_in(self, token_share: float) -> float:
        """Return the share of the neurons that are active in at least this share of the tokens.

        0 if neurons are not ordered by frequency.
        """
        if not self.by_frequency:
            return 0.0
        hot = (
            x1
            for (x0, y0), (x1, y1) in itertools.pairwise(self.curve)
            if self.chosen * self.down_read * (y1 - y0) / (x1 - x0) >= token_share
        )
        return max(hot, default=0.0)


@functools.lru_cache(maxsize=64)
def assumed_curve(activity: float) -> Points:
    """Return the curve of a model without a profile, of whose neurons this share fires.

    A neuron fires where a value exceeds a threshold. Where fewer fire, all thresholds are taken to be higher by the
    same number of standard deviations, as in generated workloads: neurons that nearly always fire still do, and rare
    ones become rarer. Equal factors for all would have the hottest ones fire less, and several sequences access more.
    """
    if not 0.0 < activity < 1.0:
        return HOTTEST
    normal = NormalDist()
    points = [
        (x1 - x0, normal.inv_cdf(min(MAX_RATE, max(MIN_RATE, HOTTEST_ACTIVITY * (y1 - y0) / (x1 - x0)))))
        for (x0, y0), (x1, y1) in itertools.pairwise(HOTTEST)
    ]
    low, high = -MAX_MOVED, MAX_MOVED
    for _ in range(BISECTIONS):
        moved = (low + high) / 2
        mean = sum(share * normal.cdf(point + moved) for share, point in points)
        low, high = (moved, high) if mean < activity else (low, moved)
    firing = [share * normal.cdf(point + low) for share, point in points]
    within = itertools.accumulate(firing, initial=0.0)
    *curve, _ = ((x, total / sum(firing)) for (x, _), total in zip(HOTTEST, within, strict=True))
    return (*curve, (1.0, 1.0))


# A search calls this thousands of times with the same few shares.
@functools.lru_cache(maxsize=64)
def _rates_along_curve(curve: Points, read: float) -> tuple[tuple[float, float, float], ...]:
    slopes = [(x0, x1, (y1 - y0) / (x1 - x0)) for (x0, y0), (x1, y1) in itertools.pairwise(curve)]
    always, left = 0.0, 1.0  # share of neurons that are always read; remaining share of activations
    for x0, x1, slope in sorted(slopes, key=lambda stretch: -stretch[2]):
        if left <= 0 or (read - always) * slope / left < 1.0:
            break
        always, left = always + x1 - x0, left - slope * (x1 - x0)
    scale = (read - always) / left if left > 1e-9 else math.inf
    return tuple((x0, x1, min(1.0, scale * slope) if slope else 0.0) for x0, x1, slope in slopes)


@functools.lru_cache(maxsize=64)
def _clusters_along_curve(curve: Points, read: float, neurons: int) -> tuple[tuple[float, float, float], ...]:
    """Return (share where it begins, where it ends, share of its clusters that a token accesses) of each stretch."""
    return tuple((x0, x1, touched_share(rate, neurons)) for x0, x1, rate in _rates_along_curve(curve, read))


def has_hints(manifest: Manifest) -> bool:
    """Return True if the package can guess neurons or experts early, for prefetching in exact mode.

    A predictor can, and so can routers that decide after attention, if they are applied before it.
    """
    late = manifest.model.experts > 1 and manifest.model.router_reads == "feed_forward"
    return late or manifest.predictor is not None


def unmeasured_predictor(manifest: Manifest, mode: Mode = "predicted") -> str | None:
    """Return a sentence on the unknown quality of a predictor that came with the checkpoint.

    None if the package has no predictor, or a measured one.
    """
    predictor = manifest.predictor
    if predictor is None or predictor.by_layer:
        return None
    origin = f"the predictor is the checkpoint's own ({ranks(predictor)}), with the threshold it was trained for"
    if mode == "exact":
        return f"{origin}; exact mode needs none, `--mode predicted` uses it"
    return (
        f"{origin}: how many of the active neurons it finds was never measured; `neuronpipe profile PACKAGE "
        "--calibrate` measures that, and fits its thresholds"
    )


def ranks(predictor: Predictor) -> str:
    """Return the rank of a predictor as text, or the range if feed-forwards have different ranks."""
    if predictor.ranks is None:
        return f"rank {predictor.rank:,}"
    mean = sum(predictor.ranks) / len(predictor.ranks)
    return f"ranks {min(predictor.ranks):,} to {predictor.rank:,}, mean {mean:,.0f}"


def miss_rate(manifest: Manifest, mode: Mode, resident_share: float, *, whole_experts: bool = False) -> float:
    """Return the share of the units accessed by a token that miss, by the activity profile or as assumed.

    The unit is a whole expert, or else a bundle in predicted mode and a value part in the others.
    """
    unit: Unit = "expert" if whole_experts else "bundle" if mode == "predicted" else "value"
    profile = profile_for(manifest, mode)
    policies: tuple[Policy, ...] = ("lfu", "clock") if whole_experts_of_token(manifest, mode) else ("clock",)
    for policy in policies:  # the cache's own, or what was measured of it
        if profile is not None and (measured := profile.miss_rate(unit, resident_share, policy)) is not None:
            return measured
    if whole_experts:
        return assumed_expert_misses(manifest.model, resident_share)
    return interpolated(ASSUMED_ROUTED_MISSES if manifest.model.experts > 1 else ASSUMED_MISSES, resident_share)


def was_measured(manifest: Manifest, mode: Mode) -> bool:
    """Return True if there is an activity profile for this mode, as `profile_for` returns it."""
    return profile_for(manifest, mode) is not None


def profile_for(manifest: Manifest, mode: Mode) -> ActivityProfile | None:
    """Return the activity profile of a mode, or the package's own of exact mode, which stands in for it.

    What runs have counted in exact mode says nothing about another mode.
    """
    if (profile := manifest.profile(mode)) is not None:
        return profile
    exact = manifest.profile("exact")
    return exact if exact is not None and exact.source != "counted" else None


def ranking(
    manifest: Manifest, mode: Mode, frequencies: AccessFrequencies | None, batch: int, *, whole_experts: bool = False
) -> Ranking | None:
    """Return the clusters ranked by access frequency in steps of `batch` sequences; None if it was not measured."""
    if frequencies is None:
        return None
    return frequencies.ranking(
        mode,
        batch,
        lambda share: miss_rate(manifest, mode, share, whole_experts=whole_experts),
        whole_experts=whole_experts,
    )


def touched_share(share: float, neurons: int) -> float:
    """Return the share of clusters with at least one active neuron, if neurons were independent.

    share: share of active neurons
    neurons: neurons of a cluster
    """
    return 1 - (1 - share) ** neurons


def rates(manifest: Manifest, mode: Mode, frequencies: AccessFrequencies | None = None) -> ActivationRates:
    """Return the activation rates of one token in this mode, as measured or assumed."""
    model = manifest.model
    fired = model.ffn_mean(manifest.fired_by_layer) or ASSUMED_FIRED
    trigger_fired = fired
    if model.all_neurons_fire:
        fired = trigger_fired = 1.0
        if mode == "thresholded" and manifest.silent is not None:
            fired = trigger_fired = 1.0 - _mean(tuple(layer.share for layer in manifest.silent.by_layer))
    elif model.activation == "drelu":
        trigger_fired = model.ffn_mean(manifest.trigger_fired_by_layer) or min(1.0, fired / UP_POSITIVE)
    triggers = 1.0
    if mode == "predicted" and manifest.predictor is not None:
        by_layer = manifest.predictor.by_layer
        triggers = _mean(tuple(layer.predicted for layer in by_layer)) or min(1.0, ASSUMED_PREDICTED * fired)
        trigger_fired, fired = min(trigger_fired, triggers), min(fired, triggers)
    profile = profile_for(manifest, mode)
    return ActivationRates(
        chosen=model.active_ffns / model.ffns,
        always=model.always_active_ffns / model.ffns if model.experts > 1 else 0.0,
        trigger_read=triggers,
        value_read=trigger_fired,
        down_read=fired,
        by_frequency=manifest.layout.neuron_order == "frequency",
        curve=assumed_curve(triggers if triggers < 1.0 else trigger_fired)
        if profile is None or profile.source == "counted"
        else profile.curve,
        frequencies=frequencies,
    )


def _mean(values: tuple[float, ...] | None) -> float:
    return sum(values) / len(values) if values else 0.0
