"""Which clusters a step wants of those that workers compute, how many of them are not in memory, and by how many reads
they come.

What a device holds counts like memory whose clusters stay: nobody looks for them. What one to four texts want together
is in an activity profile; without one, texts are taken to choose their neurons independently.
"""

from __future__ import annotations

import math

from neuronpipe.plans.cost.activation_rates import ActivationRates, miss_rate, ranking, was_measured
from neuronpipe.plans.cost.assumed_misses import assumed_miss_rate
from neuronpipe.plans.package.activity_profile import BATCHES
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Flash, Mode
from neuronpipe.protocol.frozen import frozen

# Where a token wants so much of a chosen expert's clusters, the cache sees whole experts come and go.
NEARLY_WHOLE = 0.9


@frozen
class PartAccesses:
    """Cluster parts of one kind in a step: those wanted, and of them those to be read from flash."""

    wanted: float
    missed: int


@frozen(kw_only=True)
class ResidentSlots:
    """Memory for parts of one kind. held: slots that hold something, not those kept free; pinned: of them, those whose
    clusters stay; on_device: clusters that a device holds, the first of every feed-forward, and that are not looked
    for."""

    held: int
    pinned: int
    on_device: int = 0


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
    """Of a step of so many tokens, each of which wants this share of the neurons of its chosen experts. all_wanted: all
    of theirs."""
    clusters, mixture, held = manifest.clusters, manifest.model.experts > 1, slots.held
    neurons, left = manifest.layout.cluster_neurons, manifest.clusters - slots.on_device
    of_expert = rates.clusters_wanted(share, neurons)
    of_one = of_expert * rates.chosen * clusters
    together = clusters * union(min(1.0, of_one / clusters), tokens)
    elsewhere = slots.on_device / clusters
    if not all_accessed and slots.on_device:
        elsewhere = rates.clusters_within(elsewhere, share, neurons)
    wanted = together * (1 - elsewhere)
    if held >= left:
        return PartAccesses(wanted, 0)
    if all_accessed and not mixture:  # every cluster in turn: what does not stay is gone before its next turn
        return PartAccesses(wanted, int(wanted * (1 - min(slots.pinned, left) / left)))
    # Of experts that are wanted whole, the same part of each is left.
    like_memory, scale = (0, clusters / left) if all_accessed else (slots.on_device, 1.0)
    resident, stays = (int(slots_held * scale) + like_memory for slots_held in (held, slots.pinned))
    if tokens <= max(BATCHES):
        ranked = ranking(manifest, mode, rates.heat, tokens, whole_experts=all_accessed)
        if ranked is not None:  # texts want more of the same than independent ones, and neighbours fire together
            found = ranked.wanted / scale
            missed = min(found * (1 - elsewhere) if like_memory else found, found * ranked.miss_rate(resident, stays))
            return PartAccesses(found * (1 - elsewhere) if like_memory else found, int(missed))
    # Of experts that are wanted whole, a part that stays is wanted as often as any other.
    share_staying = stays / clusters
    within = share_staying if all_accessed else rates.clusters_within(share_staying, share, neurons)
    unpinned, cached = together * (1 - within), resident - stays
    modelled = rates.by_frequency and not all_accessed and not was_measured(manifest, mode)
    if unpinned >= cached and not (
        modelled and tokens == 1
    ):  # the cache holds less than a step wants of it: all is gone before the next step
        return PartAccesses(wanted, min(int(wanted), int(unpinned / scale)))
    # Of whole experts, the cache has what is not pinned as if that was the whole model.
    cached_share = cached / (clusters - stays) if all_accessed else resident / clusters
    if not modelled:
        rate = miss_rate(manifest, mode, cached_share, whole_experts=all_accessed)
    elif mixture and of_expert >= NEARLY_WHOLE:
        rate = miss_rate(manifest, mode, cached_share, whole_experts=True)
    else:
        rate = assumed_miss_rate(rates, share, neurons, cached_share, share_staying)
    missed_one = of_one / scale * min(1 - within, rate * (1 - within) if all_accessed else rate)
    one_wanted = of_one * (1 - elsewhere)
    if tokens == 1:
        return PartAccesses(one_wanted, int(missed_one))
    # Wanted by one of them; those with a slot and those without are each taken to be alike.
    hit = held * union(min(1.0, (one_wanted - missed_one) / max(1, held)), tokens)
    missing = (left - held) * union(min(1.0, missed_one / max(1, left - held)), tokens)
    return PartAccesses(hit + missing, int(missing))


def joined_reads(missed: int, of: float, part_bytes: int, stride_bytes: int, flash: Flash) -> tuple[int, int]:
    """Reads of so many parts that miss, and their bytes, gaps included: neighbours no further apart than the merge gap
    are read together. They are taken to lie anywhere among `of` clusters, independently of each other."""
    density = min(1.0, missed / max(1.0, of))
    reach = (flash.merge_gap_bytes + part_bytes) // stride_bytes  # clusters to a neighbour that is read with it
    gap_bytes = sum(
        density * (1 - density) ** (apart - 1) * (apart * stride_bytes - part_bytes) for apart in range(1, reach + 1)
    )
    read_bytes = int(missed * (part_bytes + gap_bytes))
    return max(math.ceil(missed * (1 - density) ** reach), -(-read_bytes // flash.most_read_bytes)), read_bytes


def union(share: float, tokens: int) -> float:
    """What so many tokens want in all, each this share, independently."""
    return 1 - (1 - share) ** tokens
