"""Pinned clusters, for every number of sequences in a step: the problem in cluster_ranking.py.

In a package with an activity profile, a slot goes to the cluster that saves most misses
(plans/cost/cluster_ranking.py), in any layer and expert. In others, every feed-forward has equal numbers, by the
assumed curve.
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

# Clusters used by half of all tokens stay by themselves under any policy: pinning them only saves bookkeeping.
PINNED_FROM = 0.5
# A number of sequences has its own pins if they save at least these shares of its misses, and of its accesses.
TABLE_GAIN, TABLE_GAIN_RATE = 0.05, 0.005


@frozen(kw_only=True)
class PartSlots:
    """The slots of one part.

    count: number of slots, borrowed ones included
    moving: minimum of unpinned slots
    reserved: slots among the moving ones that are freed in advance
    borrowed: slots that may be reclaimed (plans/plan/borrowed_memory.py)
    """

    part: str  # "trigger" or "value"
    count: int
    moving: int
    reserved: int
    slot_bytes: int
    borrowed: int = 0

    def safe_for(self, accesses: float) -> PartSlots:
        """Return the slots without borrowed ones if the remaining ones would not store what a step accesses.

        Pins must leave the cache enough slots when borrowed ones are reclaimed.
        """
        if accesses < self.count - self.borrowed:
            return self
        return dataclasses.replace(self, count=self.count - self.borrowed, borrowed=0)

    @property
    def occupied_slots(self) -> int:
        """Slots with a cluster, on average."""
        return occupied_slots(self.count, self.reserved)

    @property
    def max_pinned(self) -> int:
        return max(0, self.count - self.moving)


@frozen(kw_only=True)
class PinAllocation:
    """Pins by number of sequences, the maximum of pinned clusters (triggers, values), and the reasons."""

    pins: tuple[Pins, ...]
    max_pinned: tuple[int, int]
    reasons: tuple[str, ...]


@frozen
class _PartPins:
    """The pinned clusters of one part, by feed-forward. ranking: the ranking that chose them."""

    slots: PartSlots
    counts: tuple[int, ...]
    ranking: Ranking | None = None

    @functools.cached_property
    def total(self) -> int:
        return sum(self.counts)

    def missed_bytes(self, pinned: int) -> float:
        """Return the bytes of a step's misses if `pinned` clusters were pinned."""
        if self.ranking is None:
            return 0.0
        return self.slots.slot_bytes * self.ranking.accesses * self.ranking.miss_rate(self.slots.occupied_slots, pinned)


def allocate_pins(
    manifest: Manifest,
    rates: ActivationRates,
    mode: Mode,
    *,
    whole: bool,
    max_batch: int,
    slots: tuple[PartSlots, PartSlots],
) -> PinAllocation:
    """Choose the pins of both parts for steps of one to `max_batch` sequences.

    whole: a neuron is read whole or not at all
    """
    return _PinAllocator(manifest, rates, mode, whole, slots).allocate(max_batch)


class _PinAllocator:
    def __init__(
        self, manifest: Manifest, rates: ActivationRates, mode: Mode, whole: bool, slots: tuple[PartSlots, PartSlots]
    ) -> None:
        self._manifest, self._rates, self._mode, self._whole, self._slots = manifest, rates, mode, whole, slots
        self._ffns, self._clusters = manifest.model.ffns, manifest.layout.clusters
        self._mixture = manifest.model.experts > 1
        self._unmeasured: dict[str, _PartPins] = {}

    def allocate(self, max_batch: int) -> PinAllocation:
        table: list[tuple[int, tuple[_PartPins, _PartPins]]] = []
        reasons: list[str] = []
        for count in range(1, min(max_batch, max(BATCHES)) + 1):
            pins = self._part_pins(self._slots[0], count), self._part_pins(self._slots[1], count)
            if not table:
                reasons.append(self._reason(pins))
            elif self._saves(pins, table[-1][1]):
                reasons.append(self._batch_reason(count, pins, table[0][1]))
            else:
                continue
            table.append((count, pins))
        if max_batch > 1 and len(table) == 1:
            reasons.append(self._single_entry_reason(table[0][1]))
        return PinAllocation(
            pins=tuple(
                Pins(texts=count, triggers=write_counts(triggers.counts), values=write_counts(values.counts))
                for count, (triggers, values) in table
            ),
            max_pinned=(
                max(triggers.total for _, (triggers, _) in table),
                max(values.total for _, (_, values) in table),
            ),
            reasons=tuple(reasons),
        )

    def _part_pins(self, slots: PartSlots, batch: int) -> _PartPins:
        everything = slots.count >= self._manifest.clusters
        if self._mode != "predicted" and not self._mixture and (slots.part == "trigger" or self._whole):
            # Every cluster in turn, for every token: an unpinned cluster is evicted before its next access.
            return self._equal_pins(slots, self._clusters if everything else slots.max_pinned // self._ffns)
        # Without slots of its own, the cache would have none when borrowed slots are reclaimed.
        if everything and not slots.borrowed:
            return self._equal_pins(slots, self._clusters)
        ranked = self._ranking(slots, batch)
        if ranked is None:
            if slots.part not in self._unmeasured:  # the same for any number of sequences
                self._unmeasured[slots.part] = self._equal_pins(slots, self._unmeasured_pins(slots))
            return self._unmeasured[slots.part]
        safe = slots.safe_for(ranked.accesses)
        return _PartPins(slots, ranked.pins(ranked.best_pinned(safe.occupied_slots, safe.max_pinned)), ranked)

    def _equal_pins(self, slots: PartSlots, count: int) -> _PartPins:
        return _PartPins(slots, (count,) * self._ffns)

    def _ranking(self, slots: PartSlots, batch: int) -> Ranking | None:
        by_expert = self._mode != "predicted" and (slots.part == "trigger" or self._whole)
        return ranking(self._manifest, self._mode, self._rates.frequencies, batch, whole_experts=by_expert)

    def _unmeasured_pins(self, slots: PartSlots) -> int:
        """Return how many clusters of each feed-forward are pinned without an activity profile.

        These are all that may be, or the few that are active in half of all tokens (of a mixture none), whichever is
        expected to miss less. Pins take slots from the cache, and a cache with fewer slots than a token's accesses
        never hits. So everything is pinned only if the cache would be too small without pins, too. Half of the borrowed
        slots count as reclaimed, as in the middle of a sequence.
        """
        average_slots = dataclasses.replace(slots, count=slots.count - slots.borrowed // 2, borrowed=0)
        max_each = slots.max_pinned // self._ffns
        hottest = min(int(self._rates.neurons_active_in(PINNED_FROM) * self._clusters), max_each // 2)
        few = 0 if self._mixture else hottest
        return max_each if self._missed(average_slots, max_each) < self._missed(average_slots, few) else few

    def _missed(self, slots: PartSlots, each: int) -> int:
        """Return how many clusters a token is expected to miss if `each` clusters of every feed-forward are pinned."""
        share = self._rates.trigger_read if self._whole or slots.part == "trigger" else self._rates.value_read
        resident = missing.ResidentSlots(occupied=slots.occupied_slots, pinned=min(each * self._ffns, slots.max_pinned))
        all_accessed = self._mode != "predicted" and (slots.part == "trigger" or self._whole)
        return missing.part_accesses(
            self._manifest, self._rates, self._mode, share, resident, 1, all_accessed=all_accessed
        ).misses

    # ---- several sequences -----------------------------------------------------------------------------------
    def _saves(self, pins: tuple[_PartPins, _PartPins], fewer_pins: tuple[_PartPins, _PartPins]) -> bool:
        """Return True if more sequences need pins of their own. These are more pins, so that pins for fewer
        sequences stay."""
        if any(more.total < less.total for more, less in zip(pins, fewer_pins, strict=True)):
            return False
        bytes_with_pins = sum(share.missed_bytes(share.total) for share in pins)
        bytes_with_fewer = sum(more.missed_bytes(less.total) for more, less in zip(pins, fewer_pins, strict=True))
        accessed_bytes = sum(share.slots.slot_bytes * share.ranking.accesses for share in pins if share.ranking)
        return bytes_with_pins < min(
            (1 - TABLE_GAIN) * bytes_with_fewer, bytes_with_fewer - TABLE_GAIN_RATE * accessed_bytes
        )

    # ---- reasons ---------------------------------------------------------------------------------------------
    def _reason(self, shares: tuple[_PartPins, _PartPins]) -> str:
        triggers, values = shares
        ranked = self._missing_part(shares)
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

    def _why(self, values: _PartPins) -> str:
        max_each = values.slots.max_pinned // self._ffns
        if 0 < max_each == values.counts[0]:
            return "the others are read for every token: a token wants more than fits"
        return f"which fire in {PINNED_FROM:.0%} of all tokens, the others stay while they are used"

    def _fit(self, shares: tuple[_PartPins, _PartPins]) -> str:
        triggers, values = (share.slots.count for share in shares)
        if self._mode == "predicted":
            return f"{triggers} of {self._manifest.clusters} bundles fit"
        if triggers >= self._manifest.clusters:
            return f"all triggers are resident; {values} of {self._manifest.clusters} up/down parts fit"
        return f"{triggers} and {values} of {self._manifest.clusters} trigger and value parts fit"

    def _batch_reason(
        self, batch: int, pins: tuple[_PartPins, _PartPins], single_pins: tuple[_PartPins, _PartPins]
    ) -> str:
        part, single_part = self._missing_part(pins), self._missing_part(single_pins)
        assert part.ranking is not None
        rates = (
            part.ranking.miss_rate(part.slots.occupied_slots, pinned) for pinned in (part.total, single_part.total)
        )
        return (
            "with {} texts in a step {} stay: {:.1%} of what it wants is missed, {:.1%} with what stays for one".format(
                batch, part.total, *rates
            )
        )

    def _single_entry_reason(self, shares: tuple[_PartPins, _PartPins]) -> str:
        if self._missing_part(shares).ranking is None:
            return "the same stays for several texts: how often neurons are wanted was not measured"
        return f"the same stays for several texts: pins of their own would save less than {TABLE_GAIN:.0%} of misses"

    def _missing_part(self, shares: tuple[_PartPins, _PartPins]) -> _PartPins:
        """Return the pins of the part that misses most."""
        return max(shares, key=lambda share: share.missed_bytes(share.total) if share.ranking else -1.0)
