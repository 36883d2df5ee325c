"""Choice of the pinned clusters of a plan, by the number of sequences in a step.

With an activity profile, the hottest clusters of all layers and experts are pinned, as many as save misses
(plans/cost/cluster_ranking.py states the problem). Without one, every feed-forward gets the same number of pins, by the
assumed curve of activations.
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
from neuronpipe.plans.plan.pinned_clusters import Pins, range_of_counts, write_counts
from neuronpipe.protocol.frozen import frozen

# Without a profile, clusters that this share of all tokens use are pinned. Any policy would keep them in the cache, so
# that pinning them only saves bookkeeping.
PINNED_FROM = 0.5
# A number of sequences gets its own pins if these save more than this share of the bytes that it misses with the pins
# for fewer sequences, and of the bytes that it accesses.
TABLE_GAIN, TABLE_GAIN_RATE = 0.05, 0.005


@frozen(kw_only=True)
class PartSlots:
    """The slots of one part.

    count: number of slots, including borrowed ones
    moving: minimum of unpinned slots
    reserved: slots that the cache frees in advance, out of the moving ones
    borrowed: slots that sequences may reclaim (plans/plan/borrowed_memory.py)
    """

    part: str  # "trigger" or "value"
    count: int
    moving: int
    reserved: int
    slot_bytes: int
    borrowed: int = 0

    def safe_for(self, accesses: float) -> PartSlots:
        """Return the slots to choose pins for: without borrowed ones if the others store less than a step accesses.

        The cache must have enough unpinned slots when borrowed ones are reclaimed.

        accesses: clusters that a step accesses
        """
        if accesses < self.count - self.borrowed:
            return self
        return dataclasses.replace(self, count=self.count - self.borrowed, borrowed=0)

    @property
    def occupied_slots(self) -> int:
        """Average number of slots that store a cluster."""
        return occupied_slots(self.count, self.reserved)

    @property
    def max_pinned(self) -> int:
        return max(0, self.count - self.moving)


@frozen(kw_only=True)
class PinAllocation:
    """The pins by number of sequences, the first for one, and the reasons for them.

    max_pinned: maximum, over the entries, of all pinned triggers and of all pinned values
    """

    pins: tuple[Pins, ...]
    max_pinned: tuple[int, int]
    reasons: tuple[str, ...]


@frozen
class _PartPins:
    """The numbers of pinned clusters of one part, by feed-forward.

    ranking: what chose them; None without a profile
    """

    slots: PartSlots
    counts: tuple[int, ...]
    ranking: Ranking | None = None

    @functools.cached_property
    def total(self) -> int:
        return sum(self.counts)

    def missed_bytes(self, pinned: int) -> float:
        """Return the bytes that a step misses if the `pinned` hottest clusters are pinned; 0 without a ranking."""
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

    The first entry is for one sequence. More sequences, up to the maximum of BATCHES, get an entry only if it saves
    misses (TABLE_GAIN); otherwise that for fewer sequences applies.

    whole: both parts of a neuron are always used together
    slots: the slots of triggers, and those of values
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
            # Every token reads every cluster in turn, so an unpinned cluster is evicted before its next access.
            return self._as_many_pins(slots, self._manifest.clusters if everything else slots.max_pinned)
        # If borrowed slots are needed for everything, the cache must have unpinned slots left when they are reclaimed.
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

    def _as_many_pins(self, slots: PartSlots, total: int) -> _PartPins:
        """Return pins of `total` clusters in all, of which the first feed-forwards have one more than the others."""
        each, more = divmod(total, self._ffns)
        return _PartPins(slots, tuple(each + (ffn < more) for ffn in range(self._ffns)))

    def _ranking(self, slots: PartSlots, batch: int) -> Ranking | None:
        by_expert = self._mode != "predicted" and (slots.part == "trigger" or self._whole)
        return ranking(self._manifest, self._mode, self._rates.frequencies, batch, whole_experts=by_expert)

    def _unmeasured_pins(self, slots: PartSlots) -> int:
        """Return how many clusters of each feed-forward are pinned without an activity profile.

        These are the few clusters that are active in half of all tokens (none in a mixture), or the allowed maximum if
        the cache cannot store what a token accesses and more pins are expected to miss less. Half of the borrowed slots
        count as reclaimed, as in the middle of a sequence.
        """
        average_slots = dataclasses.replace(slots, count=slots.count - slots.borrowed // 2, borrowed=0)
        max_each = slots.max_pinned // self._ffns
        hottest = min(int(self._rates.neurons_active_in(PINNED_FROM) * self._clusters), max_each // 2)
        few = 0 if self._mixture else hottest
        with_few = self._accesses(average_slots, few)
        if with_few.accesses < average_slots.occupied_slots:
            return few  # which clusters are hot is assumed, while the cache follows the sequence
        with_most = self._accesses(average_slots, max_each)
        return max_each if int(with_most.misses) < int(with_few.misses) else few

    def _accesses(self, slots: PartSlots, each: int) -> missing.PartAccesses:
        """Return the accesses and misses that are expected of a token if `each` clusters of every feed-forward are
        pinned."""
        share = self._rates.trigger_read if self._whole or slots.part == "trigger" else self._rates.value_read
        resident = missing.ResidentSlots(occupied=slots.occupied_slots, pinned=min(each * self._ffns, slots.max_pinned))
        all_accessed = self._mode != "predicted" and (slots.part == "trigger" or self._whole)
        return missing.part_accesses(
            self._manifest, self._rates, self._mode, share, resident, 1, all_accessed=all_accessed
        )

    # ---- several sequences -----------------------------------------------------------------------------------
    def _saves(self, pins: tuple[_PartPins, _PartPins], fewer_pins: tuple[_PartPins, _PartPins]) -> bool:
        """Return True if a number of sequences gets these pins instead of those for fewer sequences.

        They must save enough misses, and pin no fewer clusters of either part, so that clusters stay pinned when the
        number of sequences grows.
        """
        if any(more.total < less.total for more, less in zip(pins, fewer_pins, strict=True)):
            return False
        bytes_with_pins = sum(part.missed_bytes(part.total) for part in pins)
        bytes_with_fewer = sum(more.missed_bytes(less.total) for more, less in zip(pins, fewer_pins, strict=True))
        accessed_bytes = sum(part.slots.slot_bytes * part.ranking.accesses for part in pins if part.ranking)
        return bytes_with_pins < min(
            (1 - TABLE_GAIN) * bytes_with_fewer, bytes_with_fewer - TABLE_GAIN_RATE * accessed_bytes
        )

    # ---- reasons ---------------------------------------------------------------------------------------------
    def _reason(self, pins: tuple[_PartPins, _PartPins]) -> str:
        triggers, values = pins
        ranked = self._missing_part(pins)
        if ranked.ranking is not None:
            slots = ranked.slots.occupied_slots
            if not ranked.total:
                return (
                    f"{self._fit(pins)}, and stay while they are used: {ranked.ranking.miss_rate(slots, 0):.1%} of "
                    "what a token wants is missed, and pinning would save hardly any of that"
                )
            return (
                f"{self._fit(pins)}; by worth per byte {ranked.total} of {slots} slots are for the hottest of all "
                f"layers and the cache has the others: {ranked.ranking.miss_rate(slots, ranked.total):.1%} of what a "
                f"token wants is missed, {ranked.ranking.miss_rate(slots, 0):.1%} were nothing pinned"
            )
        if triggers.slots.count < self._manifest.clusters and self._mode != "predicted" and not self._mixture:
            return (
                f"{range_of_counts(write_counts(triggers.counts))} of {self._clusters} triggers per layer stay, the "
                "others are read for every token: memory does not hold all triggers"
            )
        if not values.total:
            return f"{self._fit(pins)}, and stay while they are used"
        hottest = f"the {values.counts[0]} hottest of the {self._clusters} of each layer stay"
        return f"{self._fit(pins)}; {hottest}, {self._why(values)}"

    def _why(self, values: _PartPins) -> str:
        max_each = values.slots.max_pinned // self._ffns
        if 0 < max_each == values.counts[0]:
            return "the others are read for every token: a token wants more than fits"
        return f"which fire in {PINNED_FROM:.0%} of all tokens, the others stay while they are used"

    def _fit(self, pins: tuple[_PartPins, _PartPins]) -> str:
        triggers, values = (part.slots.count for part in pins)
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

    def _single_entry_reason(self, pins: tuple[_PartPins, _PartPins]) -> str:
        if self._missing_part(pins).ranking is None:
            return "the same stays for several texts: how often neurons are wanted was not measured"
        return f"the same stays for several texts: pins of their own would save less than {TABLE_GAIN:.0%} of misses"

    def _missing_part(self, pins: tuple[_PartPins, _PartPins]) -> _PartPins:
        """Return the pins of the part that misses most bytes."""
        return max(pins, key=lambda part: part.missed_bytes(part.total) if part.ranking else -1.0)
