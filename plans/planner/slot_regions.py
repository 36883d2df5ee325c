"""Slots: how many each part gets, and how many of them are moving. cluster_allocation.py chooses the pinned clusters.

Memory goes where a byte saves most. Without a predictor every token reads every trigger part, but a value part only if
its neurons are active, so triggers get slots first. In predicted mode a neuron is read whole or not at all, so both
parts get equal numbers of slots.
"""

from __future__ import annotations

from typing import Any

from neuronpipe.plans.cost.activation_rates import ActivationRates, touched_share
from neuronpipe.plans.package.layout import PAGE_BYTES, SlotPlaces
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Mode
from neuronpipe.plans.plan.pinned_clusters import Pins
from neuronpipe.plans.plan.segment_sizes import slots_layout
from neuronpipe.plans.planner.cluster_allocation import PartSlots, allocate_pins
from neuronpipe.protocol.frozen import frozen

# Slots that the cache frees in advance, for each expected miss of one token.
STOCK_FACTOR = 2
MIN_STOCK = 64
# Maximum of these slots, as a share of all. The cache frees more in a fraction of a layer's time, and a free slot
# stores nothing: with a fifth of the slots free, exact mode at half resident missed three quarters of the active
# neurons.
MAX_STOCK = 1 / 32
# A mixture keeps a whole layer open, so that no expert waits for another, if slots store this many layers: the other
# layers always have something to evict.
OPEN_LAYER_FROM = 4
# Maximum of the slots that are then freed in advance, as a share of those that are not pinned.
MAX_OPEN_STOCK = 1 / 64
NOTHING_PINNED = Pins(texts=1, triggers="0", values="0")


@frozen(kw_only=True)
class Regions:
    """The slots of a plan, and their use."""

    triggers: int
    values: int
    places: SlotPlaces  # what a trigger slot and a value slot contain
    pins: tuple[Pins, ...]  # by the number of sequences in a step
    moving: int  # slots of either part for clusters that are open or being read
    window_blocks: int  # the block window: blocks of a feed-forward, or all of a layer's, that are open at once
    reserved_triggers: int  # slots that the cache frees in advance
    reserved_values: int
    reasons: tuple[str, ...]
    borrowed_triggers: int = 0  # additional slots in borrowed memory
    borrowed_values: int = 0

    def memory(self, manifest: Manifest) -> dict[str, Any]:
        """Return the plan's memory fields about slots."""
        moved = self.places.moved_bytes > 0
        return {
            "trigger_slots": self.triggers,
            "value_slots": self.values,
            "slots_bytes": slots_layout(manifest, self.triggers, self.values, moved=moved).total_bytes,
            "lent_trigger_slots": self.borrowed_triggers,
            "lent_value_slots": self.borrowed_values,
            "moving_slots": self.moving,
            "pins": self.pins,
            "moved_scales_from": self.places.moved_from,
            "moved_scales_bytes": self.places.moved_bytes,
        }


def allocate_slots(
    manifest: Manifest,
    rates: ActivationRates,
    *,
    mode: Mode,
    workers: int,
    max_batch: int,
    budget: int,
    whole: bool,
    moved: bool = False,
    cache: bool,
    cache_tokens: int,
    borrowable_bytes: int = 0,
) -> Regions | None:
    """Divide `budget` bytes between trigger and value slots. None if one open block per worker does not fit.

    max_batch: maximum of sequences in a step
    whole: both parts of a cluster are read together
    moved: co-locate scales if that fits
    cache: False: slots only for what is being computed or read
    cache_tokens: slots only for what this number of tokens uses, without pins (0: as many as fit)
    borrowable_bytes: memory that slots may borrow in addition to `budget`
    """
    for places in (manifest.slots(moved=True), manifest.slots()) if moved else (manifest.slots(),):
        allocator = _SlotAllocator(manifest, rates, mode, workers, max_batch, whole, places, borrowable_bytes)
        # Value slots begin at a page boundary, so co-located scales may need one page more.
        remaining = budget - PAGE_BYTES if places.moved_bytes else budget
        if (regions := allocator.allocate(remaining, cache=cache, cache_tokens=cache_tokens)) is not None:
            return regions
    return None


class _SlotAllocator:
    def __init__(
        self,
        manifest: Manifest,
        rates: ActivationRates,
        mode: Mode,
        workers: int,
        max_batch: int,
        whole: bool,
        places: SlotPlaces,
        borrowable_bytes: int,
    ) -> None:
        self._manifest, self._layout, self._rates, self._mode = manifest, manifest.layout, rates, mode
        self._places = places
        self._workers, self._max_batch, self._borrowable_bytes = workers, max_batch, borrowable_bytes
        self._ffns, self._experts, self._mixture = (
            manifest.model.ffns,
            manifest.model.most_experts,
            manifest.model.experts > 1,
        )
        # Neurons are read whole or not at all: they are predicted, all are active, or both parts are read together.
        self._whole = whole or mode == "predicted" or rates.value_read >= rates.trigger_read
        self._all = manifest.clusters
        self._trigger_bytes, self._value_bytes = places.trigger_bytes, places.value_bytes
        self._both_bytes = places.both_bytes

    def allocate(self, budget: int, *, cache: bool, cache_tokens: int) -> Regions | None:
        if cache and not cache_tokens and budget >= self._all * self._both_bytes:
            return self._everything()
        window_blocks, moving = self._block_window(budget if cache else 0)
        if budget < moving * self._both_bytes:
            return None
        reasons = []
        if not cache:
            triggers = values = moving
            reasons.append("nothing stays but what a step needs, by request (cache)")
        elif cache_tokens:
            used = touched_share(self._rates.used_by(cache_tokens), self._layout.cluster_neurons)
            triggers = values = min(budget // self._both_bytes, moving + int(used * self._all), self._all)
            reasons.append(f"slots for what {cache_tokens} tokens use, nothing pinned, by request (llm-in-a-flash)")
        else:
            triggers, values = self._divide(budget, moving)
        reserved_triggers = self._reserved(triggers, self._rates.trigger_read, moving // 2)
        reserved_values = self._reserved(values, self._rates.value_read, moving // 2)
        pins: tuple[Pins, ...] = (NOTHING_PINNED,)
        free, borrowed = min(triggers, values), (0, 0)
        if cache and not cache_tokens:
            borrowed = self._borrowed_slots(moving, triggers, values) if self._borrowable_bytes else borrowed
            trigger_slots, value_slots = (
                PartSlots(
                    part=part,
                    count=count + borrowed_count,
                    moving=moving,
                    reserved=reserved,
                    slot_bytes=size,
                    borrowed=borrowed_count,
                )
                for part, count, borrowed_count, reserved, size in (
                    ("trigger", triggers, borrowed[0], reserved_triggers, self._trigger_bytes),
                    ("value", values, borrowed[1], reserved_values, self._value_bytes),
                )
            )
            slots = trigger_slots, value_slots
            pin_allocation = allocate_pins(
                self._manifest, self._rates, self._mode, whole=self._whole, max_batch=self._max_batch, slots=slots
            )
            pins, free = pin_allocation.pins, self._min_free(slots, pin_allocation.max_pinned)
            reasons += pin_allocation.reasons
        if self._mixture and free >= OPEN_LAYER_FROM * self._experts * self._layout.clusters:
            window_blocks = self._experts * self._layout.blocks
            reserved_triggers = max(reserved_triggers, self._reserved_of_layer(triggers, free))
            reserved_values = max(reserved_values, self._reserved_of_layer(values, free))
            moving = max(moving, self._experts * self._layout.clusters + max(reserved_triggers, reserved_values))
        layer = "layer" if window_blocks > self._layout.blocks or not self._mixture else "feed-forward"
        of = self._layout.blocks * (self._experts if layer == "layer" else 1)
        reasons.insert(0, f"{window_blocks} of {of} blocks of a {layer} open at once: {moving} clusters may be moving")
        return Regions(
            triggers=triggers,
            values=values,
            places=self._places,
            pins=pins,
            moving=moving,
            window_blocks=window_blocks,
            reserved_triggers=reserved_triggers,
            reserved_values=reserved_values,
            reasons=tuple(reasons),
            borrowed_triggers=borrowed[0],
            borrowed_values=borrowed[1],
        )

    def _borrowed_slots(self, moving: int, triggers: int, values: int) -> tuple[int, int]:
        """Return the slots of either part that there would be in addition if slots had the borrowable memory, too."""
        slots_bytes = triggers * self._trigger_bytes + values * self._value_bytes
        with_borrowed = self._divide(slots_bytes + self._borrowable_bytes, moving)
        return max(0, with_borrowed[0] - triggers), max(0, with_borrowed[1] - values)

    def _divide(self, budget: int, moving: int) -> tuple[int, int]:
        """Return the slots of either part in `budget` bytes: equal numbers if neurons are used whole, else all triggers
        before more than `moving` values."""
        if self._whole:
            count = min(budget // self._both_bytes, self._all)
            return count, count
        if budget >= self._all * self._trigger_bytes + moving * self._value_bytes:
            return self._all, min(self._all, (budget - self._all * self._trigger_bytes) // self._value_bytes)
        return min(self._all, (budget - moving * self._value_bytes) // self._trigger_bytes), moving

    def _everything(self) -> Regions:
        return Regions(
            triggers=self._all,
            values=self._all,
            places=self._places,
            pins=(Pins(texts=1, triggers=str(self._layout.clusters), values=str(self._layout.clusters)),),
            moving=0,
            window_blocks=self._experts * self._layout.blocks,
            reserved_triggers=0,
            reserved_values=0,
            reasons=("everything is resident: nothing is read after start-up",),
        )

    def _block_window(self, budget: int) -> tuple[int, int]:
        """Return the blocks of a layer that are open at once, and the clusters that may be moving.

        Moving clusters are those that any worker has open, and as many again that are free or being read. The window is
        a whole layer if memory fits two layers, and smaller only if it must be, since the reads of a block window wait
        for those of the window before. Workers may have windows open of neighbouring blocks or of two experts, but not
        of two layers.

        Slots for a larger window come from added memory, never from pins: before the window grows, `moving` grows to
        its size while the number of other slots does not change. Otherwise more memory would be slower.
        """
        (window_blocks, moving, _), *larger = self._windows()
        opened_bytes = 0  # the budget from which on the previous window is used
        for blocks, needed_slots, from_bytes in larger:
            from_bytes = max(from_bytes, opened_bytes)
            if budget < from_bytes:
                break
            remaining_bytes = from_bytes - moving * self._both_bytes
            opened_bytes = max(from_bytes, remaining_bytes + needed_slots * self._both_bytes)
            if budget < opened_bytes:
                return window_blocks, max(moving, (budget - remaining_bytes) // self._both_bytes)
            window_blocks, moving = blocks, needed_slots
        if moving >= self._all:
            moving, window_blocks = min(self._all, max(self._moving(1), self._all // 2)), 1
        return window_blocks, moving

    def _windows(self) -> list[tuple[int, int, int]]:
        """Return the block windows that may be planned, smallest first: (blocks, moving clusters, bytes for slots).

        A window is preferred from these bytes on, which fit three times its moving clusters (twice for a whole layer).
        """
        workers, blocks = self._workers, self._layout.blocks
        parts = [max(1, blocks // (2 * workers))]
        while parts[-1] > 1:
            parts.append((parts[-1] + 1) // 2)
        windows = [(part, self._moving(part), 3 * self._moving(part) * self._both_bytes) for part in reversed(parts)]
        moving = 2 * self._layout.clusters * (workers if self._mixture else 1)
        return [*windows, (blocks, moving, 2 * moving * self._both_bytes)]

    def _moving(self, window_blocks: int) -> int:
        """Return the clusters that may be moving while every worker has `window_blocks` blocks open."""
        return 2 * window_blocks * self._workers * self._layout.block_clusters

    def _min_free(self, slots: tuple[PartSlots, PartSlots], pinned: tuple[int, int]) -> int:
        """Return the unpinned slots of the part that has fewer. A fully resident part counts with all its slots."""
        free = (
            part_slots.count if part_slots.count == self._all else part_slots.count - pinned_count
            for part_slots, pinned_count in zip(slots, pinned, strict=True)
        )
        return min(free)

    def _reserved_of_layer(self, slots: int, free: int) -> int:
        """Return how many slots the cache frees in advance if a whole layer is open: STOCK_FACTOR times what a token
        chooses of it, so that the misses of a layer wait for no slot and need one message. 0 if every cluster has a
        slot.

        free: slots that are not pinned
        """
        chosen = self._rates.chosen * self._experts * self._layout.clusters
        return 0 if slots == self._all else min(int(STOCK_FACTOR * chosen), int(MAX_OPEN_STOCK * free))

    def _reserved(self, slots: int, share: float, limit: int) -> int:
        """Return how many slots the cache frees in advance: STOCK_FACTOR times the expected misses of one token.

        This is limited to MAX_STOCK of the slots, but at least MIN_STOCK, and never over the limit. 0 if every cluster
        has a slot.

        limit: half of the moving slots
        """
        if slots == self._all:
            return 0
        accesses = self._rates.chosen * touched_share(share, self._layout.cluster_neurons) * self._all
        misses = accesses * (1 - self._rates.activations_within(slots / self._all))
        return min(limit, max(MIN_STOCK, min(int(STOCK_FACTOR * misses), int(MAX_STOCK * slots))))
