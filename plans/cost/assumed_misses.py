"""Assumed misses of clusters of an unmeasured package, from those of a measured model.

The more neurons a cluster has, the larger is the share of the clusters that a token accesses, and the fewer steps the
same share in memory covers. A `Ranking` accounts for that: from access frequencies it computes for how many steps CLOCK
keeps a cluster, and multiplies the misses of independent tokens by a factor, since real tokens repeat accesses. The
factor depends on the number of steps only. It is computed from the misses of a measured model, whose clusters may have
another size.
"""

from __future__ import annotations

import functools
import math

from neuronpipe.plans.cost.activation_rates import (
    ASSUMED_FIRED,
    ASSUMED_PREDICTED,
    ASSUMED_ROUTED_MISSES,
    ActivationRates,
    assumed_curve,
    touched_share,
)
from neuronpipe.plans.cost.cluster_ranking import Bins, Ranking
from neuronpipe.plans.package.activity_profile import Points, interpolated
from neuronpipe.protocol.frozen import frozen

CLUSTERS = 1 << 16  # of a ranking here; results are shares, so the package's own number does not matter


@frozen
class MeasuredModel:
    """Misses of a model's clusters with CLOCK in predicted mode, with nothing pinned.

    neurons: neurons of a cluster
    chosen: share of a layer's experts that a token chooses
    misses: miss rate by the share of all clusters that is resident; with less than the first share it is computed
    read: share of the neurons of a chosen expert that a token reads
    """

    neurons: int
    chosen: float
    misses: Points
    read: float = ASSUMED_PREDICTED * ASSUMED_FIRED


# A 1B, of whose clusters a token accesses a fifth, by runs of `bench` from 25 to 85 %, below by simulating CLOCK on
# generated accesses (tests/bench/results, planned right after a clone).
DENSE_MISSES: Points = (
    (0.22, 0.27),
    (0.242, 0.241),
    (0.29, 0.173),
    (0.34, 0.129),
    (0.39, 0.0945),
    (0.435, 0.0725),
    (0.485, 0.0552),
    (0.535, 0.0425),
    (0.58, 0.0327),
    (0.65, 0.0217),
    (0.73, 0.0128),
    (0.84, 0.0045),
    (1.0, 0.0),
)
# A 7B, of whose clusters a token accesses an eighth, by runs of `bench` from 18 to 75 %, below by simulating CLOCK on
# generated accesses.
DENSE_NEURONS_MISSES: Points = (
    (0.14, 0.266),
    (0.175, 0.205),
    (0.24, 0.108),
    (0.29, 0.077),
    (0.39, 0.044),
    (0.485, 0.0267),
    (0.58, 0.0155),
    (0.725, 0.0047),
    (1.0, 0.0),
)
# A model of 100 million parameters, of whose clusters a token accesses a third, by runs of `bench`.
DENSE_FIVES_MISSES: Points = (
    (0.436, 0.405),
    (0.504, 0.154),
    (0.58, 0.085),
    (0.65, 0.05),
    (0.725, 0.0262),
    (0.825, 0.0086),
    (1.0, 0.0),
)
DENSE = (
    MeasuredModel(1, 1.0, DENSE_NEURONS_MISSES),
    MeasuredModel(2, 1.0, DENSE_MISSES, read=0.135),
    MeasuredModel(5, 1.0, DENSE_FIVES_MISSES, read=0.159),
)
# A 2B, of whose clusters a token accesses a twelfth, by runs of `bench` from 15 to 75 %, else by simulation.
ROUTED_CLUSTERS_MISSES: Points = (
    (0.113, 0.677),
    (0.15, 0.583),
    (0.22, 0.424),
    (0.3, 0.289),
    (0.37, 0.212),
    (0.45, 0.147),
    (0.52, 0.106),
    (0.6, 0.07),
    (0.67, 0.0465),
    (0.75, 0.0266),
    (0.85, 0.012),
    (1.0, 0.0),
)
# The first one is the 47B.
ROUTED = (
    MeasuredModel(1, 0.25, ASSUMED_ROUTED_MISSES[2:]),
    MeasuredModel(4, 0.25, ROUTED_CLUSTERS_MISSES, read=0.149),
)


def assumed_miss_rate(
    rates: ActivationRates, read: float, neurons: int, resident_share: float, pinned_share: float
) -> float:
    """Return the assumed share of a token's cluster accesses that miss.

    read: share of the neurons of a chosen expert that a token reads
    neurons: neurons of a cluster
    resident_share: share of all clusters that is in memory
    pinned_share: share of all clusters that is pinned; these are the hottest
    """
    ranking = _ranking(rates.rates_along_curve(read), neurons, rates.routed, rates.always)
    return ranking.miss_rate(round(resident_share * ranking.clusters), round(pinned_share * ranking.clusters))


@frozen
class SharedAccesses:
    """The accesses of several sequences in a step.

    share: share of all clusters that at least one sequence accesses
    miss_rate: share of these that miss
    """

    share: float
    miss_rate: float


def assumed_accesses(
    rates: ActivationRates, read: float, neurons: int, resident_share: float, pinned_share: float, tokens: int
) -> SharedAccesses:
    """Return the assumed accesses of `tokens` sequences that access clusters independently, with the same frequencies.

    Other parameters are as in `assumed_miss_rate`.
    """
    ranking = _ranking(rates.rates_along_curve(read), neurons, rates.routed, rates.always, tokens)
    rate = ranking.miss_rate(round(resident_share * ranking.clusters), round(pinned_share * ranking.clusters))
    return SharedAccesses(ranking.accesses / ranking.clusters, rate)


@functools.lru_cache(maxsize=64)
def _ranking(
    stretches: tuple[tuple[float, float, float], ...], neurons: int, routed: float, always: float, tokens: int = 1
) -> Ranking:
    """Return the ranking of the experts that routers choose, `routed` of them for a token, and of those that compute
    every token, which are this share of all."""
    reference = _reference(neurons, mixture=routed < 1.0)
    of_routers, of_all = _bins(stretches, neurons, routed, 1 - always), _bins(stretches, neurons, 1.0, always)
    return Ranking(
        [[(1 - (1 - each) ** tokens, count) for each, count in bins] for bins in (of_all, of_routers)], reference
    )


@functools.lru_cache(maxsize=16)
def _reference(neurons: int, *, mixture: bool) -> Ranking:
    """Return the ranking of the measured model whose clusters have the most similar size, for its factors."""
    measured = min(ROUTED if mixture else DENSE, key=lambda model: abs(math.log(model.neurons / neurons)))
    rates = ActivationRates(
        chosen=measured.chosen,
        trigger_read=measured.read,
        value_read=measured.read,
        down_read=measured.read,
        by_frequency=True,
        curve=assumed_curve(measured.read),
    )
    bins = _bins(rates.rates_along_curve(measured.read), measured.neurons, measured.chosen, 1.0)
    return Ranking([bins], lambda share: interpolated(measured.misses, share), measured.misses[0][0])


def _bins(stretches: tuple[tuple[float, float, float], ...], neurons: int, chosen: float, share: float) -> Bins:
    """Return how often a step accesses the clusters of each stretch, which are from `rates_along_curve`.

    chosen: share of the experts that a token chooses
    share: share of all clusters that these experts have
    """
    return [
        (chosen * touched_share(rate, neurons), round(last * share * CLUSTERS) - round(first * share * CLUSTERS))
        for first, last, rate in stretches
    ]
