"""Expected cluster accesses of the workers in a step, their misses, and the reads for these.

Workers do not access offloaded clusters, which count like pinned ones. An activity profile has the common accesses of
one to four sequences; without one, sequences are assumed to choose their neurons independently.
"""

from __future__ import annotations

from neuronpipe.plans.activity.eviction_rule import whole_experts_of_token
from neuronpipe.plans.cost.activation_rates import ActivationRates, miss_rate, ranking, was_measured
from neuronpipe.plans.cost.assumed_misses import assumed_accesses, assumed_miss_rate
from neuronpipe.plans.cost.expert_misses import assumed_misses_of_sequences, hot_experts_of
from neuronpipe.plans.package.activity_profile import BATCHES
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Flash, Mode
from neuronpipe.protocol.frozen import frozen

# From this share of a chosen expert's clusters that a token accesses on, misses are those of whole experts.
NEARLY_WHOLE = 0.9
# A prompt's step of so many tokens that uses at least half of the experts has the cache evict what the step has read
# before anything else, so that other clusters stay (NP_SCAN_TOKENS of the engine).
SCAN_TOKENS = 64


@frozen
class PartAccesses:
    """The mean accesses of triggers or of values in a step, in clusters, and how many of them miss."""

    accesses: float
    misses: float


@frozen(kw_only=True)
class ResidentSlots:
    """Memory for the triggers or for the values, in clusters.

    occupied: slots that store a cluster
    pinned: occupied slots whose cluster is pinned
    offloaded: clusters that an accelerator computes, the first of every feed-forward
    """

    occupied: int
    pinned: int
    offloaded: int = 0


def part_accesses(
    manifest: Manifest,
    rates: ActivationRates,
    mode: Mode,
    share: float,
    slots: ResidentSlots,
    tokens: int,
    *,
    all_accessed: bool,
) -> PartAccesses:
    """Return the accesses of triggers or of values in a step of `tokens` tokens.

    share: share of the neurons of its chosen experts that each token reads
    all_accessed: each token accesses all clusters of its chosen experts
    """
    model, clusters, occupied = manifest.model, manifest.clusters, slots.occupied
    mixture = model.experts > 1
    neurons, on_workers = manifest.layout.cluster_neurons, manifest.clusters - slots.offloaded
    expert_share = rates.clusters_accessed(share, neurons)
    token_accesses = expert_share * rates.chosen * clusters
    together = clusters * accessed_by_any(manifest, rates, expert_share, tokens)
    offloaded_share = slots.offloaded / clusters
    if not all_accessed and slots.offloaded:
        offloaded_share = rates.clusters_within(offloaded_share, share, neurons)
    accesses = together * (1 - offloaded_share)
    if occupied >= on_workers:
        return PartAccesses(accesses, 0)
    if all_accessed and mixture and tokens >= SCAN_TOKENS and 2 * together >= clusters:
        return PartAccesses(accesses, accesses * (1 - occupied / on_workers))
    if all_accessed and not mixture:  # clusters are accessed in turn: an unpinned one is evicted before its next access
        return PartAccesses(accesses, accesses * (1 - min(slots.pinned, on_workers) / on_workers))
    # If experts are read whole, workers compute the same share of each: the rest counts as if it did not exist.
    offloaded_resident, scale = (0, clusters / on_workers) if all_accessed else (slots.offloaded, 1.0)
    resident, pinned = (int(clusters_of * scale) + offloaded_resident for clusters_of in (occupied, slots.pinned))
    if tokens <= max(BATCHES):
        ranked = ranking(manifest, mode, rates.frequencies, tokens, whole_experts=all_accessed)
        if ranked is not None:  # real sequences share more than independent ones, and neighbours are active together
            ranked_accesses = ranked.accesses / scale
            misses = min(
                ranked_accesses * (1 - offloaded_share) if offloaded_resident else ranked_accesses,
                ranked_accesses * ranked.miss_rate(resident, pinned),
            )
            return PartAccesses(
                ranked_accesses * (1 - offloaded_share) if offloaded_resident else ranked_accesses, misses
            )
    # If experts are read whole, pinned clusters are accessed as often as others.
    share_staying = pinned / clusters
    within = share_staying if all_accessed else rates.clusters_within(share_staying, share, neurons)
    unpinned, cached = together * (1 - within), resident - pinned
    modelled = rates.by_frequency and not all_accessed and not was_measured(manifest, mode)
    by_whole_experts = mixture and expert_share >= NEARLY_WHOLE
    if modelled and not by_whole_experts and 1 < tokens <= max(BATCHES):
        shared = assumed_accesses(rates, share, neurons, resident / clusters, share_staying, tokens)
        if slots.offloaded:
            offloaded_share = rates.clusters_within(slots.offloaded / clusters, share, neurons, tokens)
        computed = clusters * shared.share * (1 - offloaded_share)
        return PartAccesses(computed, min(computed, clusters * shared.share * shared.miss_rate))
    independent = not rates.frequencies and not was_measured(manifest, mode) and not hot_experts_of(model.family).share
    if 1 < tokens <= max(BATCHES) and mixture and independent and (all_accessed or by_whole_experts):
        always, room = rates.always * clusters, clusters - pinned
        routed_share = (resident - pinned - always) / max(1.0, room - always)
        missed = assumed_misses_of_sequences(model, max(0.0, routed_share), tokens) * (together - always * expert_share)
        return PartAccesses(accesses, min(accesses, missed * room / clusters / scale))
    # Of LFU. Longer steps use nearly all experts, in the order of layers, so it evicts as CLOCK does.
    keeps_the_most_used = all_accessed and tokens <= max(BATCHES) and whole_experts_of_token(manifest, mode)
    if unpinned >= cached and not (
        keeps_the_most_used or (modelled and tokens == 1)
    ):  # the cache has fewer slots than a step accesses: everything is evicted before the next step
        return PartAccesses(accesses, min(accesses, unpinned / scale))
    # If experts are read whole, the cache serves the unpinned clusters as if they were the whole model.
    cached_share = cached / (clusters - pinned) if all_accessed else resident / clusters
    if all_accessed and tokens > 1:
        rate = _rate_of_sequences(manifest, mode, min(1.0, cached_share), tokens)
        if keeps_the_most_used:  # at least as many as clusters that were kept for good would serve
            rate = min(rate, max(0.0, 1 - cached_share))
    elif not modelled:
        rate = miss_rate(manifest, mode, cached_share, whole_experts=all_accessed)
    elif by_whole_experts and tokens > 1:
        rate = _rate_of_sequences(manifest, mode, min(1.0, cached_share), tokens)
    elif by_whole_experts:
        rate = miss_rate(manifest, mode, cached_share, whole_experts=True)
    else:
        rate = assumed_miss_rate(rates, share, neurons, cached_share, share_staying)
    token_misses = token_accesses / scale * min(1 - within, rate * (1 - within) if all_accessed else rate)
    computed_accesses = token_accesses * (1 - offloaded_share)
    if tokens == 1:
        return PartAccesses(computed_accesses, token_misses)
    # Clusters that at least one token accesses. All with a slot are assumed to be alike, and all without one.
    hits = occupied * union(min(1.0, (computed_accesses - token_misses) / max(1, occupied)), tokens)
    misses = (on_workers - occupied) * union(min(1.0, token_misses / max(1, on_workers - occupied)), tokens)
    return PartAccesses(hits + misses, misses)


def _rate_of_sequences(manifest: Manifest, mode: Mode, resident_share: float, tokens: int) -> float:
    """Return the miss rate of each of `tokens` sequences that choose whole experts independently.

    Each has its own share of the cache, and finds those of its experts that others have brought there. Hot experts are
    common to all.
    """
    hot = hot_experts_of(manifest.model.family).share
    if resident_share <= hot:
        return miss_rate(manifest, mode, resident_share, whole_experts=True)
    not_by_one: float = ((1 - resident_share) / (1 - hot)) ** (
        1 / tokens
    )  # share of the others that a sequence does not keep
    of_one = miss_rate(manifest, mode, 1 - (1 - hot) * not_by_one, whole_experts=True)
    return of_one * not_by_one ** (tokens - 1)


def accessed_by_any(manifest: Manifest, rates: ActivationRates, expert_share: float, tokens: int) -> float:
    """Return the share of all clusters that at least one of `tokens` independent tokens accesses.

    expert_share: share of the clusters of a chosen expert that a token accesses
    """
    model, hot = manifest.model, hot_experts_of(manifest.model.family)
    hot_share = hot.count(model.experts) / model.experts
    other_experts = max(0.0, rates.routed - hot_share * hot.frequency) / (1 - hot_share)
    routed = hot_share * union(min(1.0, hot.frequency * expert_share), tokens) + (1 - hot_share) * union(
        min(1.0, other_experts * expert_share), tokens
    )
    return rates.always * union(expert_share, tokens) + (1 - rates.always) * routed


def joined_reads(
    misses: float, among_clusters: float, part_bytes: int, stride_bytes: int, flash: Flash
) -> tuple[float, float]:
    """Return the mean number of reads for these misses, and their bytes including gaps.

    Neighbours no further apart than the merge gap are read together.

    misses: clusters to read, independently distributed over `among_clusters` clusters
    part_bytes: bytes to read of each cluster
    stride_bytes: bytes from one cluster to the next in the file
    """
    density = min(1.0, misses / max(1.0, among_clusters))
    max_distance = (flash.merge_gap_bytes + part_bytes) // stride_bytes  # to a neighbour in the same read
    gap_bytes = sum(
        density * (1 - density) ** (distance - 1) * (distance * stride_bytes - part_bytes)
        for distance in range(1, max_distance + 1)
    )
    read_bytes = misses * (part_bytes + gap_bytes)
    return max(misses * (1 - density) ** max_distance, read_bytes / flash.most_read_bytes), read_bytes


def union(share: float, tokens: int) -> float:
    """Return the share that at least one of `tokens` independent tokens accesses, if each accesses `share`."""
    return 1 - (1 - share) ** tokens
