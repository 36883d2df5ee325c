"""Which clusters stay in memory, for every number of texts that a step may compute: the problem in README.md.

Where the package was measured, a slot goes to whom it saves most misses (plans/cost/cluster_ranking.py), whichever
layer and expert that
is. Where it was not, every feed-forward keeps as many, by the assumed curve.
"""

from __future__ import annotations

import dataclasses
import functools

from neuronpipe.plans.cost import expected_misses as missing
from neuronpipe.plans.cost.activation_rates import ActivationRates, ranking
from neuronpipe.plans.cost.cluster_ranking import Ranking, occupied_slots
from neuronpipe.plans.package.activity_profile import BATCHES
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Mode
from neuronpipe.plans.plan.pinned_clusters import Pins, write_counts
from neuronpipe.protocol.frozen import frozen

# What fires in half of all tokens stays by itself under any policy: pinning it only saves the looking.
PINNED_FROM = 0.5
# A number of texts has pins of its own where they save at least this part of its misses, and of what it wants.
TABLE_GAIN, TABLE_GAIN_RATE = 0.05, 0.005


@frozen(kw_only=True)
class PartSlots:
    """Of one part: all its slots, those that must be free to move, of these those that are kept free. lent: how many of
    all may go (plans/plan/borrowed_memory.py)."""

    part: str  # "trigger" or "value"
    count: int
    moving: int
    reserved: int
    slot_bytes: int
    lent: int = 0

    def safe_for(self, wanted: float) -> PartSlots:
        """With the lent ones; without, where others would not hold what a step wants: it must stay when they go."""
        if wanted < self.count - self.lent:
            return self
        return dataclasses.replace(self, count=self.count - self.lent, lent=0)

    @property
    def occupied_slots(self) -> int:
        """How many hold something, on average."""
        return occupied_slots(self.count, self.reserved)

    @property
    def most_pinned(self) -> int:
        """How many may stay."""
        return max(0, self.count - self.moving)


@frozen(kw_only=True)
class PinAllocation:
    """What stays, by number of texts; the most clusters that ever do, (triggers, values); and why."""

    pins: tuple[Pins, ...]
    most: tuple[int, int]
    reasons: tuple[str, ...]


@frozen
class _Share:
    """What stays of one part: clusters of each feed-forward. ranking: by which they were chosen."""

    slots: PartSlots
    counts: tuple[int, ...]
    ranking: Ranking | None = None

    @functools.cached_property
    def total(self) -> int:
        return sum(self.counts)

    def missed_bytes(self, pinned: int) -> float:
        """What a step reads, were so many pinned."""
        if self.ranking is None:
            return 0.0
        return self.slots.slot_bytes * self.ranking.wanted * self.ranking.miss_rate(self.slots.occupied_slots, pinned)


def allocate_pins(
    manifest: Manifest,
    rates: ActivationRates,
    mode: Mode,
    *,
    whole: bool,
    texts: int,
    slots: tuple[PartSlots, PartSlots],
) -> PinAllocation:
    """Share the slots of both parts out, for steps of one to so many texts. whole: a neuron is wanted whole or not at
    all."""
    return _Allocating(manifest, rates, mode, whole, slots).allocate_pins(texts)


class _Allocating:
    def __init__(
        self, manifest: Manifest, rates: ActivationRates, mode: Mode, whole: bool, slots: tuple[PartSlots, PartSlots]
    ) -> None:
        self._manifest, self._rates, self._mode, self._whole, self._slots = manifest, rates, mode, whole, slots
        self._ffns, self._clusters = manifest.model.ffns, manifest.layout.clusters
        self._mixture = manifest.model.experts > 1

    def allocate_pins(self, texts: int) -> PinAllocation:
        table: list[tuple[int, tuple[_Share, _Share]]] = []
        reasons: list[str] = []
        for count in range(1, min(texts, max(BATCHES)) + 1):
            shares = self._share(self._slots[0], count), self._share(self._slots[1], count)
            if not table:
                reasons.append(self._said(shares))
            elif self._saves(shares, table[-1][1]):
                reasons.append(self._said_of_several(count, shares, table[0][1]))
            else:
                continue
            table.append((count, shares))
        if texts > 1 and len(table) == 1:
            reasons.append(self._said_of_one_entry(table[0][1]))
        return PinAllocation(
            pins=tuple(
                Pins(texts=count, triggers=write_counts(one.counts), values=write_counts(other.counts))
                for count, (one, other) in table
            ),
            most=(max(one.total for _, (one, _) in table), max(other.total for _, (_, other) in table)),
            reasons=tuple(reasons),
        )

    def _share(self, slots: PartSlots, texts: int) -> _Share:
        everything = slots.count >= self._manifest.clusters
        if self._mode != "predicted" and not self._mixture and (slots.part == "trigger" or self._whole):
            # Every cluster in turn, for every token: what is not pinned is gone before its next turn.
            return self._alike(slots, self._clusters if everything else slots.most_pinned // self._ffns)
        if everything and not slots.lent:  # with lent slots, pins would leave the cache nothing when these go
            return self._alike(slots, self._clusters)
        ranked = self._ranking(slots, texts)
        if ranked is None:
            return self._alike(slots, self._unmeasured(slots))
        safe = slots.safe_for(ranked.wanted)
        return _Share(slots, ranked.pins(ranked.best_pinned(safe.occupied_slots, safe.most_pinned)), ranked)

    def _alike(self, slots: PartSlots, each: int) -> _Share:
        return _Share(slots, (each,) * self._ffns)

    def _ranking(self, slots: PartSlots, texts: int) -> Ranking | None:
        by_expert = self._mode != "predicted" and (slots.part == "trigger" or self._whole)
        return ranking(self._manifest, self._mode, self._rates.heat, texts, whole_experts=by_expert)

    def _unmeasured(self, slots: PartSlots) -> int:
        """Return how many clusters of each feed-forward stay, where no profile says how often each is wanted: all that
        may, or the few that fire in half of all tokens (of a mixture none), whichever is expected to miss less.

        What stays is taken from the cache, and a cache that holds less than a token wants of it hits nothing. So much
        stays only where the cache without it would hold less than that, too. Half of the lent slots count as gone, as
        they are in the middle of a text."""
        owned = dataclasses.replace(slots, count=slots.count - slots.lent // 2, lent=0)
        most = slots.most_pinned // self._ffns
        hottest = min(int(self._rates.neurons_active_in(PINNED_FROM) * self._clusters), most // 2)
        few = 0 if self._mixture else hottest
        return most if self._missed(owned, most) < self._missed(owned, few) else few

    def _missed(self, slots: PartSlots, each: int) -> int:
        """Return how many clusters a token is expected to miss where so many of each feed-forward stay."""
        share = self._rates.trigger_read if self._whole or slots.part == "trigger" else self._rates.value_read
        there = missing.PartSlots(held=slots.occupied_slots, pinned=min(each * self._ffns, slots.most_pinned))
        all_accessed = self._mode != "predicted" and (slots.part == "trigger" or self._whole)
        return missing.parts(self._manifest, self._rates, self._mode, share, there, 1, all_accessed=all_accessed).missed

    # ---- several texts ---------------------------------------------------------------------------------------
    def _saves(self, own: tuple[_Share, _Share], other: tuple[_Share, _Share]) -> bool:
        """Whether more texts are worth pins of their own; which are more, so that what stays for fewer stays on."""
        if any(one.total < two.total for one, two in zip(own, other, strict=True)):
            return False
        with_own = sum(share.missed_bytes(share.total) for share in own)
        with_other = sum(one.missed_bytes(two.total) for one, two in zip(own, other, strict=True))
        wanted = sum(share.slots.slot_bytes * share.ranking.wanted for share in own if share.ranking)
        return with_own < min((1 - TABLE_GAIN) * with_other, with_other - TABLE_GAIN_RATE * wanted)

    # ---- what is said ----------------------------------------------------------------------------------------
    def _said(self, shares: tuple[_Share, _Share]) -> str:
        triggers, values = shares
        ranked = self._looked_up(shares)
        if ranked.ranking is not None:
            slots = ranked.slots.occupied_slots
            if not ranked.total:
                return (
                    f"{self._fit(shares)}, and stay while they are used: {ranked.ranking.miss_rate(slots, 0):.1%} of "
                    "what a token wants is missed, and pinning would save hardly any of that"
                )
            return (
                f"{self._fit(shares)}; by worth per byte {ranked.total} of {slots} slots are for the hottest of all "
                f"layers and the cache has the others: {ranked.ranking.miss_rate(slots, ranked.total):.1%} of what a "
                f"token wants is missed, {ranked.ranking.miss_rate(slots, 0):.1%} were nothing pinned"
            )
        if triggers.slots.count < self._manifest.clusters and self._mode != "predicted" and not self._mixture:
            return (
                f"{triggers.counts[0]} of {self._clusters} triggers per layer stay, the others are read for every "
                "token: memory does not hold all triggers"
            )
        if not values.total:
            return f"{self._fit(shares)}, and stay while they are used"
        hottest = f"the {values.counts[0]} hottest of the {self._clusters} of each layer stay"
        return f"{self._fit(shares)}; {hottest}, {self._why(values)}"

    def _why(self, values: _Share) -> str:
        most = values.slots.most_pinned // self._ffns
        if 0 < most == values.counts[0]:
            return "the others are read for every token: a token wants more than fits"
        return f"which fire in {PINNED_FROM:.0%} of all tokens, the others stay while they are used"

    def _fit(self, shares: tuple[_Share, _Share]) -> str:
        triggers, values = (share.slots.count for share in shares)
        if self._mode == "predicted":
            return f"{triggers} of {self._manifest.clusters} bundles fit"
        if triggers >= self._manifest.clusters:
            return f"all triggers are resident; {values} of {self._manifest.clusters} up/down parts fit"
        return f"{triggers} and {values} of {self._manifest.clusters} trigger and value parts fit"

    def _said_of_several(self, texts: int, own: tuple[_Share, _Share], one: tuple[_Share, _Share]) -> str:
        share, other = self._looked_up(own), self._looked_up(one)
        assert share.ranking is not None
        rates = (share.ranking.miss_rate(share.slots.occupied_slots, pinned) for pinned in (share.total, other.total))
        return (
            "with {} texts in a step {} stay: {:.1%} of what it wants is missed, {:.1%} with what stays for one".format(
                texts, share.total, *rates
            )
        )

    def _said_of_one_entry(self, shares: tuple[_Share, _Share]) -> str:
        if self._looked_up(shares).ranking is None:
            return "the same stays for several texts: how often neurons are wanted was not measured"
        return f"the same stays for several texts: pins of their own would save less than {TABLE_GAIN:.0%} of misses"

    def _looked_up(self, shares: tuple[_Share, _Share]) -> _Share:
        """Of the parts, the one that misses."""
        return max(shares, key=lambda share: share.missed_bytes(share.total) if share.ranking else -1.0)
