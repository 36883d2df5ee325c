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
    HOTTEST,
    ActivationRates,
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
    misses: miss rate by the share of all clusters that is resident
    """

    neurons: int
    chosen: float
    misses: Points


# A 1B, of whose clusters a token accesses a fifth. With 50 and 75 % resident by runs (5.6 and 1.4 %), with 30 and 55 %
# by simulating CLOCK on recorded accesses (tests/bench/results, cache policies), below on generated accesses.
DENSE_MISSES: Points = (
    (0.0, 1.0),
    (0.2, 1.0),
    (0.22, 0.27),
    (0.27, 0.2),
    (0.3, 0.153),
    (0.5, 0.055),
    (0.55, 0.036),
    (0.75, 0.014),
    (1.0, 0.0),
)
# A 7B, of whose clusters a token accesses an eighth, by simulating CLOCK on generated accesses. Published are 5 % with
# half resident.
DENSE_NEURONS_MISSES: Points = (
    (0.0, 1.0),
    (0.127, 1.0),
    (0.14, 0.266),
    (0.17, 0.222),
    (0.2, 0.159),
    (0.25, 0.115),
    (0.3, 0.087),
    (0.4, 0.055),
    (0.5, 0.038),
    (0.75, 0.014),
    (1.0, 0.0),
)
DENSE = (MeasuredModel(1, 1.0, DENSE_NEURONS_MISSES), MeasuredModel(2, 1.0, DENSE_MISSES))
# A 47B, by a run. A 2B, of whose clusters a token accesses a twelfth, by runs of `bench` with 15, 30, 45 and 60 %
# resident; half of the reserved slots are subtracted.
ROUTED = (
    MeasuredModel(1, 0.25, ASSUMED_ROUTED_MISSES),
    MeasuredModel(
        4, 0.25, ((0.0, 1.0), (0.083, 1.0), (0.148, 0.666), (0.295, 0.263), (0.443, 0.132), (0.59, 0.066), (1.0, 0.0))
    ),
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
    ranking = _ranking(rates.rates_along_curve(read), neurons, rates.chosen)
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
    ranking = _ranking(rates.rates_along_curve(read), neurons, rates.chosen, tokens)
    rate = ranking.miss_rate(round(resident_share * ranking.clusters), round(pinned_share * ranking.clusters))
    return SharedAccesses(ranking.accesses / ranking.clusters, rate)


@functools.lru_cache(maxsize=64)
def _ranking(
    stretches: tuple[tuple[float, float, float], ...], neurons: int, chosen: float, tokens: int = 1
) -> Ranking:
    reference = _reference(neurons, mixture=chosen < 1.0)
    bins = [(1 - (1 - each) ** tokens, count) for each, count in _bins(stretches, neurons, chosen)]
    return Ranking([bins], reference)


@functools.lru_cache(maxsize=16)
def _reference(neurons: int, *, mixture: bool) -> Ranking:
    """Return the ranking of the measured model whose clusters have the most similar size, for its factors."""
    measured = min(ROUTED if mixture else DENSE, key=lambda model: abs(math.log(model.neurons / neurons)))
    read = ASSUMED_PREDICTED * ASSUMED_FIRED
    rates = ActivationRates(
        chosen=measured.chosen, trigger_read=read, value_read=read, down_read=read, by_frequency=True, curve=HOTTEST
    )
    bins = _bins(rates.rates_along_curve(read), measured.neurons, measured.chosen)
    return Ranking([bins], lambda share: interpolated(measured.misses, share))


def _bins(stretches: tuple[tuple[float, float, float], ...], neurons: int, chosen: float) -> Bins:
    """Return how often a step accesses the clusters of each stretch, which are from `rates_along_curve`."""
    return [
        (chosen * touched_share(rate, neurons), round(last * CLUSTERS) - round(first * CLUSTERS))
        for first, last, rate in stretches
    ]
