"""Activation rates of neurons, and miss rates of a cache: measured for the package, or else assumed.

A package with an activity profile has a curve of its own: the share of activations that the hottest neurons make.
Otherwise the curve is that of a 7B dReLU model over a million tokens (Bamboo-7B, mean over 32 layers, read off the
figure that its authors published). It is no power law: some neurons are nearly always active, and the rest has a slow
tail.
"""

from __future__ import annotations

import functools
import itertools
import math

from neuronpipe.plans.cost.access_frequency import AccessFrequencies
from neuronpipe.plans.cost.cluster_ranking import Ranking
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.activity_profile import ActivityProfile, Points, Unit, interpolated
from neuronpipe.plans.package.manifest import Manifest, Predictor
from neuronpipe.plans.plan.document import Mode
from neuronpipe.protocol.frozen import frozen

# (share of a layer's neurons, hottest first; share of the layer's activations that they make)
HOTTEST: Points = (
    (0.0, 0.0),
    (0.01, 0.061),
    (0.02, 0.120),
    (0.05, 0.280),
    (0.10, 0.466),
    (0.20, 0.608),
    (0.30, 0.699),
    (0.43, 0.791),
    (0.50, 0.832),
    (0.70, 0.925),
    (1.0, 1.0),
)
# Assumed miss rates of CLOCK by resident share, for packages without a profile. This curve is for bundles of a dense
# model, by simulation (plans/lab/simulate).
ASSUMED_MISSES: Points = ((0.0, 1.0), (0.1, 0.45), (0.25, 0.125), (0.5, 0.04), (0.75, 0.014), (1.0, 0.0))
# Assumed miss rates of whole experts, by resident experts over the experts of one token, from 1 to 2. Below 1 all miss.
# Beyond 2, the last rate is multiplied by a factor, by the share of the other experts that is resident too. The factors
# are by CLOCK on the recorded routes of Qwen3-30B-A3B and Gemma-4-26B-A4B (156 tokens each, 6 of 128 experts), with a
# line to 0 for their last points, which are 3 % of first uses. The rates are the means of these routes (0.75 to 0.53)
# and of the routers of four synthetic shapes (0.6 to 0.36), which have up to 4 of 32 experts.
ASSUMED_EXPERT_MISSES: Points = ((1.0, 0.68), (1.2, 0.63), (1.5, 0.58), (2.0, 0.45))
ASSUMED_EXPERT_MISSES_LEFT: Points = (
    (0.0, 1.0),
    (0.05, 0.86),
    (0.1, 0.67),
    (0.15, 0.51),
    (0.2, 0.375),
    (0.3, 0.195),
    (0.4, 0.107),
    (0.5, 0.079),
    (1.0, 0.0),
)
# Assumed miss rates of the experts that are not hot, in a family with hot experts, by the share of them that is
# resident besides all hot ones. SmallThinker-4B and -21B, simulated (plans/lab/simulate).
ASSUMED_COLD_EXPERT_MISSES: Points = (
    (0.0, 1.0),
    (0.07, 0.91),
    (0.13, 0.73),
    (0.25, 0.49),
    (0.45, 0.3),
    (0.62, 0.19),
    (1.0, 0.0),
)
# Assumed miss rates of bundles of experts, by resident share: by a run at 15 and 30 %, else by simulation. At 55 % the
# simulated rate is reduced by a quarter, since a 2B missed that much less in runs.
ASSUMED_ROUTED_MISSES: Points = (
    (0.0, 1.0),
    (0.032, 1.0),
    (0.05, 0.71),
    (0.08, 0.5),
    (0.15, 0.28),
    (0.3, 0.15),
    (0.55, 0.053),
    (0.75, 0.025),
    (1.0, 0.0),
)
ASSUMED_FIRED = 0.1  # share of the neurons that fire for a token, if the package does not state it
ASSUMED_PREDICTED = 1.3  # predicted neurons per active neuron, if the predictor was never measured
UP_POSITIVE = 0.8  # dReLU: share of the neurons with an active gate whose Up is positive, too


@frozen
class HotExperts:
    """Experts that a family's routers choose far more often than others, as published.

    share: share of a layer's experts that are hot
    frequency: share of all tokens that choose each of them
    """

    share: float = 0.0
    frequency: float = 0.0

    def count(self, experts: int) -> int:
        """Return the number of hot experts among a layer's `experts`."""
        return round(self.share * experts)


_HOT_EXPERTS = {"smallthinker": HotExperts(share=0.2, frequency=0.4)}


def hot_experts_of(family: str) -> HotExperts:
    """Return the hot experts of a family's models; share 0 where all are chosen about equally often."""
    return _HOT_EXPERTS.get(family, HotExperts())


@frozen(kw_only=True)
class ActivationRates:
    """Shares of the neurons of a chosen feed-forward whose rows a token reads: means over layers and tokens."""

    chosen: float  # share of all experts that compute a token; 1 in a dense model
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

    def clusters_within(self, share: float, read: float, neurons: int) -> float:
        """Return the share of a token's cluster accesses that go to the first `share` of the clusters.

        read: share of all neurons that the token reads
        neurons: neurons of a cluster
        """
        if not self.by_frequency:
            return share
        stretches = _clusters_along_curve(self.curve, read, neurons)
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
    measured = profile.miss_rate(unit, resident_share) if profile is not None else None
    if measured is not None:
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


def assumed_expert_misses(model: ModelSpec, resident_share: float) -> float:
    """Return the assumed miss rate of whole experts, by the share of all experts that is resident.

    If memory has room for all hot experts and the other experts of one token, hot experts never miss, and the others
    compete for the remaining memory. With less memory, down to room for one token's experts, the rate is interpolated.
    Experts that compute every token never miss, and the others compete for the remaining memory.
    """
    all_chosen, always = model.active_ffns / model.ffns, model.always_active_ffns / model.ffns
    if resident_share < all_chosen:
        return 1.0
    if resident_share >= 1.0 or model.experts == 1:
        return 0.0
    routed_share = (resident_share - always) / (1 - always)
    return (1 - always / all_chosen) * _assumed_routed_misses(model, routed_share)


def _assumed_routed_misses(model: ModelSpec, resident_share: float) -> float:
    """Return the assumed miss rate of the experts that routers choose, by the share of these that is resident."""
    chosen = model.experts_per_token / model.experts
    if resident_share < chosen:
        return 1.0
    (_, repeated), *_, (twice, left) = ASSUMED_EXPERT_MISSES
    hot = hot_experts_of(model.family)
    hot_share = hot.count(model.experts) / model.experts
    if hot_share:
        others = chosen - hot_share * hot.frequency  # experts of a token that are not hot, of all experts
        all_hot = max(chosen, hot_share + others)
        cold_share = (max(resident_share, all_hot) - hot_share) / (1 - hot_share)
        rate = others / chosen * interpolated(ASSUMED_COLD_EXPERT_MISSES, cold_share)
        return rate + (repeated - rate) * max(0.0, all_hot - resident_share) / max(all_hot - chosen, 1e-9)
    times = resident_share / chosen
    rate = interpolated(ASSUMED_EXPERT_MISSES, min(times, twice))
    if times > twice:
        rate = left * interpolated(ASSUMED_EXPERT_MISSES_LEFT, (resident_share - twice * chosen) / (1 - twice * chosen))
    return min(rate, repeated * (1 - resident_share) / (1 - chosen))


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
        trigger_read=triggers,
        value_read=trigger_fired,
        down_read=fired,
        by_frequency=manifest.layout.neuron_order == "frequency",
        curve=HOTTEST if profile is None else profile.curve,
        frequencies=frequencies,
    )


def _mean(values: tuple[float, ...] | None) -> float:
    return sum(values) / len(values) if values else 0.0
