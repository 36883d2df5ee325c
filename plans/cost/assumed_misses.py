"""Misses of clusters of a package that was not measured, from those of a model that was.

A token wants a larger share of the clusters the more neurons they have, so that the same share in memory covers fewer
steps. A `Ranking` knows that: from frequencies it finds for how many steps CLOCK holds what was wanted, and multiplies
what independent tokens would miss by a factor for how much tokens repeat. That factor belongs to the number of steps;
it is found once, from the misses of a model whose clusters have another size.
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

CLUSTERS = 1 << 16  # of a ranking: it stands for shares of any number of clusters


@frozen
class Measured:
    """What CLOCK misses of the clusters of a model in predicted mode, with nothing pinned.

    neurons: of a cluster
    chosen: share of the experts that a token chooses
    misses: share of what a token wants, by the share of all clusters that is resident
    """

    neurons: int
    chosen: float
    misses: Points


# A 1B: half and three quarters resident by runs (5.6 and 1.4 %), the others by CLOCK on what its tokens wanted
# (plans/lab/simulate/README.md, policies). A token wants a fifth.
DENSE = (
    Measured(2, 1.0, ((0.0, 1.0), (0.2, 1.0), (0.3, 0.153), (0.5, 0.055), (0.55, 0.036), (0.75, 0.014), (1.0, 0.0))),
)
# A 47B, by a run; and a 2B by runs of `bench` with 15, 30, 45 and 60 % resident, less half of the slots kept free. A
# token wants a twelfth of the latter.
ROUTED = (
    Measured(1, 0.25, ASSUMED_ROUTED_MISSES),
    Measured(
        4, 0.25, ((0.0, 1.0), (0.083, 1.0), (0.148, 0.666), (0.295, 0.263), (0.443, 0.132), (0.59, 0.066), (1.0, 0.0))
    ),
)


def assumed_miss_rate(
    rates: ActivationRates, read: float, neurons: int, resident_share: float, pinned_share: float
) -> float:
    """Return the assumed share of the clusters that a token wants and that are not in memory.

    read: share of the neurons of a chosen expert that a token reads
    neurons: of a cluster
    resident_share: clusters in memory, of all
    pinned_share: clusters that stay, the hottest ones, of all
    """
    ranking = _ranking(rates.rates_along_curve(read), neurons, rates.chosen)
    return ranking.miss_rate(round(resident_share * ranking.clusters), round(pinned_share * ranking.clusters))


@functools.lru_cache(maxsize=16)
def _ranking(stretches: tuple[tuple[float, float, float], ...], neurons: int, chosen: float) -> Ranking:
    return Ranking([_bins(stretches, neurons, chosen)], _reference(neurons, mixture=chosen < 1.0))


@functools.lru_cache(maxsize=16)
def _reference(neurons: int, *, mixture: bool) -> Ranking:
    """Return the ranking of the measured model whose clusters are most like these: its factors hold for others."""
    measured = min(ROUTED if mixture else DENSE, key=lambda model: abs(math.log(model.neurons / neurons)))
    read = ASSUMED_PREDICTED * ASSUMED_FIRED
    rates = ActivationRates(
        chosen=measured.chosen, trigger_read=read, value_read=read, down_read=read, by_frequency=True, curve=HOTTEST
    )
    bins = _bins(rates.rates_along_curve(read), measured.neurons, measured.chosen)
    return Ranking([bins], lambda share: interpolated(measured.misses, share))


def _bins(stretches: tuple[tuple[float, float, float], ...], neurons: int, chosen: float) -> Bins:
    """Return how often a step wants each cluster of so many neurons, hottest first."""
    return [
        (chosen * touched_share(rate, neurons), round(last * CLUSTERS) - round(first * CLUSTERS))
        for first, last, rate in stretches
    ]
