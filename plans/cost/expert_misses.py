"""Assumed misses of whole experts in a package without an activity profile.

A router chooses the experts with the greatest values. Of the values' variance an expert's own part is the same for all
tokens of a sequence, and the rest differs from token to token. So within a sequence experts have different access
frequencies, and a `Ranking` computes for how many steps CLOCK keeps them. Real tokens repeat experts more often, so the
result is multiplied by a factor that depends on the number of steps only, from recorded routes.
"""

from __future__ import annotations

import functools
import itertools
import math
from statistics import NormalDist

from neuronpipe.plans.cost.cluster_ranking import Bins, Ranking
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.activity_profile import Points, interpolated
from neuronpipe.protocol.frozen import frozen

# Share of a router's variance that is an expert's own. Fitted to recorded routes: without the factors, the misses of
# RECORDED_MISSES are within 8 points.
EXPERT_SHARE = 0.5
# Families whose experts have no part of their own. Of the two experts of a Mixtral's token, 35 to 43 % are published to
# be those of the token before, and few come back later. Of SmallThinker's experts that are not hot it is assumed.
_WITHOUT_OWN_SHARE = frozenset({"llama", "smallthinker"})
# Different frequencies of experts in a sequence, alone and with others; and clusters of a ranking here.
FREQUENCIES, FEW_FREQUENCIES, CLUSTERS = 64, 8, 1 << 16
RECORDED = 6, 128  # experts of a token and of a layer
# Misses by resident share: up to 30 % means of LFU replayed over recorded routes of Qwen3-30B-A3B and Gemma-4-26B-A4B
# from the 65th token on, and over generated routes (plans/lab/simulate), which miss up to 5 points less. The recorded
# texts have one topic, so beyond 30 % only those of generated routes, whose topics change.
RECORDED_MISSES: Points = (
    (0.047, 0.617),
    (0.06, 0.557),
    (0.08, 0.478),
    (0.1, 0.417),
    (0.12, 0.363),
    (0.15, 0.297),
    (0.2, 0.215),
    (0.25, 0.155),
    (0.3, 0.114),
    (0.35, 0.086),
    (0.4, 0.065),
    (0.45, 0.048),
    (0.5, 0.035),
    (0.55, 0.026),
    (0.6, 0.019),
    (0.7, 0.013),
    (0.8, 0.008),
    (0.9, 0.004),
    (1.0, 0.0),
)
# The same of 2 of 8 experts that have no part of their own, simulated with LFU (plans/lab/simulate). Runs of a 2B
# missed 52, 33 and 19 % with 30, 45 and 60 % resident.
EVEN = 2, 8
EVEN_MISSES: Points = (
    (0.26, 0.596),
    (0.3, 0.551),
    (0.35, 0.492),
    (0.4, 0.434),
    (0.45, 0.388),
    (0.5, 0.337),
    (0.55, 0.29),
    (0.6, 0.246),
    (0.7, 0.165),
    (0.8, 0.099),
    (0.9, 0.041),
    (1.0, 0.0),
)
# Misses of several sequences with LFU, relative to those of CLOCK by a `Ranking`, and to those if the most frequent
# experts stayed for good. With 26 to 60 % resident, the lower is 15 % below to 20 % above those of simulated layers of
# 8, 16 and 32 experts. CLOCK misses everything where a step needs more experts than there are slots.
LFU_OF_CLOCK, LFU_OF_STATIC = 0.87, 1.06
# Of a family with hot experts, if memory has room for just one token's experts.
JUST_FITTING_MISSES = 0.68
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


def own_share_of(family: str) -> float:
    """Return the share of a router's variance that is an expert's own, the same for all tokens of a sequence."""
    return 0.0 if family in _WITHOUT_OWN_SHARE else EXPERT_SHARE


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
    hot = hot_experts_of(model.family)
    hot_share = hot.count(model.experts) / model.experts
    if hot_share:
        other_experts = chosen - hot_share * hot.frequency  # experts of a token that are not hot, of all experts
        all_hot = max(chosen, hot_share + other_experts)
        cold_share = (max(resident_share, all_hot) - hot_share) / (1 - hot_share)
        rate = other_experts / chosen * interpolated(ASSUMED_COLD_EXPERT_MISSES, cold_share)
        rate += (JUST_FITTING_MISSES - rate) * max(0.0, all_hot - resident_share) / max(all_hot - chosen, 1e-9)
        return min(rate, JUST_FITTING_MISSES * (1 - resident_share) / (1 - chosen))
    ranking = _ranking(model.experts_per_token, model.experts, 1, own_share_of(model.family))
    return ranking.miss_rate(round(resident_share * ranking.clusters), 0)


def assumed_misses_of_sequences(model: ModelSpec, resident_share: float, sequences: int) -> float:
    """Return the assumed miss rate of the routed experts that at least one of several sequences chooses in a step. Each
    sequence has its own frequent experts.

    resident_share: share of the routed experts that is resident
    """
    if resident_share >= 1.0:
        return 0.0
    ranking = _ranking(model.experts_per_token, model.experts, sequences, own_share_of(model.family))
    slots = round(resident_share * ranking.clusters)
    rate = ranking.miss_rate(slots, 0)
    if sequences == 1:
        return rate
    return min(1.0, LFU_OF_CLOCK * rate, LFU_OF_STATIC * ranking.miss_rate(slots, slots))


@functools.lru_cache(maxsize=32)
def _ranking(chosen: int, experts: int, sequences: int, own_share: float) -> Ranking:
    if sequences == 1:
        return Ranking([_bins(chosen, experts, FREQUENCIES, own_share)], _reference(own_share))
    of_one = [frequency for frequency, _ in _bins(chosen, experts, FEW_FREQUENCIES, own_share)]
    bins = []
    for each in itertools.combinations_with_replacement(range(FEW_FREQUENCIES), sequences):
        orders = math.factorial(sequences) // math.prod(math.factorial(each.count(n)) for n in set(each))
        not_chosen = math.prod(1 - of_one[n] for n in each)
        bins.append((1 - not_chosen, round(CLUSTERS * orders / FEW_FREQUENCIES**sequences)))
    return Ranking([sorted(bins, reverse=True)], _reference(own_share))


@functools.lru_cache(maxsize=2)
def _reference(own_share: float) -> Ranking:
    sizes, misses = (RECORDED, RECORDED_MISSES) if own_share else (EVEN, EVEN_MISSES)
    bins = _bins(*sizes, FREQUENCIES, own_share)
    return Ranking([bins], lambda share: interpolated(misses, share), misses[0][0])


def _bins(chosen: int, experts: int, count: int, own_share: float) -> Bins:
    """Return `count` access frequencies of experts within a sequence, most frequent first.

    A token chooses experts whose value exceeds a threshold. The values are normally distributed.
    """
    normal = NormalDist()
    threshold = normal.inv_cdf(1 - chosen / experts)
    frequencies = [
        normal.cdf(
            (math.sqrt(own_share) * normal.inv_cdf(1 - (n + 0.5) / count) - threshold) / math.sqrt(1 - own_share)
        )
        for n in range(count)
    ]
    scale = chosen / experts * count / sum(frequencies)
    return [(min(1.0, scale * each), CLUSTERS // count) for each in frequencies]
