"""The neurons' memory: how many slots either part gets, how many may be moving. Which clusters stay is
cluster_allocation.py's.

Memory is filled by worth per byte. Without a predictor every trigger part is read for every token, so that a resident
one saves its bytes with certainty, and a value part only as often as its neurons fire: triggers first. In predicted
mode a neuron is wanted whole or not at all: both parts get as many slots.
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

STOCK_FACTOR = 2  # free slots kept ready, over the misses expected of one token
MIN_STOCK = 64
# Of the slots: the cache frees more in a fraction of a layer's time, and a slot kept free holds nothing. With a fifth
# kept free, exact mode at half resident missed three quarters of what fired.
MAX_STOCK = 1 / 32
# A mixture keeps a whole layer in place, so that no expert waits for another, where slots hold so many layers: in the
# others there is always something to evict.
OPEN_LAYER_FROM = 4
NOTHING_PINNED = Pins(texts=1, triggers="0", values="0")


@frozen(kw_only=True)
class Regions:
    """Slots of either part, and what becomes of them."""

    triggers: int
    values: int
    places: SlotPlaces  # what a slot of either part holds
    pins: tuple[Pins, ...]  # what stays, by how many texts a step computes
    moving: int  # slots of either part that are for what is open or on its way
    window_blocks: int  # the block window: blocks of a feed-forward, or all of a layer's, that are open at once
    reserved_triggers: int
    reserved_values: int
    reasons: tuple[str, ...]
    lent_triggers: int = 0  # more of them, in memory that is lent
    lent_values: int = 0

    def memory(self, manifest: Manifest) -> dict[str, Any]:
        """What a plan's memory says of them, by its fields."""
        moved = self.places.moved_bytes > 0
        return {
            "trigger_slots": self.triggers,
            "value_slots": self.values,
            "slots_bytes": slots_layout(manifest, self.triggers, self.values, moved=moved).total_bytes,
            "lent_trigger_slots": self.lent_triggers,
            "lent_value_slots": self.lent_values,
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
    texts: int,
    budget: int,
    whole: bool,
    moved: bool = False,
    cache: bool,
    cache_tokens: int,
    lendable_bytes: int = 0,
) -> Regions | None:
    """Share `budget` bytes out between trigger and value slots; None when it is too small for one block per worker.

    texts: most that a step computes. whole: both parts of a cluster are read together. moved: value slots hold the
    scales of their rows. cache: False keeps only what a step needs. cache_tokens: keep no more than so many tokens use
    (0: whatever fits). lendable_bytes: what may be lent to slots besides.
    """
    for places in (manifest.slots(moved=True), manifest.slots()) if moved else (manifest.slots(),):
        filling = _Filling(manifest, rates, mode, workers, texts, whole, places, lendable_bytes)
        # Value slots begin with a page; larger than one, the last of them may end in another than the budget does.
        left = budget - PAGE_BYTES if places.moved_bytes else budget
        if (made := filling.allocate_slots(left, cache=cache, cache_tokens=cache_tokens)) is not None:
            return made
    return None


class _Filling:
    def __init__(
        self,
        manifest: Manifest,
        rates: ActivationRates,
        mode: Mode,
        workers: int,
        texts: int,
        whole: bool,
        places: SlotPlaces,
        lendable_bytes: int,
    ) -> None:
        self._manifest, self._layout, self._rates, self._mode = manifest, manifest.layout, rates, mode
        self._places = places
        self._workers, self._texts, self._lendable_bytes = workers, texts, lendable_bytes
        self._ffns, self._experts, self._mixture = (
            manifest.model.ffns,
            manifest.model.experts,
            manifest.model.experts > 1,
        )
        # A neuron is wanted whole or not at all: it was predicted, or every neuron fires; or both parts come anyway.
        self._whole = whole or mode == "predicted" or rates.value_read >= rates.trigger_read
        self._all = manifest.clusters
        self._trigger_bytes, self._value_bytes = places.trigger_bytes, places.value_bytes
        self._both_bytes = places.both_bytes

    def allocate_slots(self, budget: int, *, cache: bool, cache_tokens: int) -> Regions | None:
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
            triggers, values = self._share_out(budget, moving)
        reserved_triggers = self._reserved(triggers, self._rates.trigger_read, moving)
        reserved_values = self._reserved(values, self._rates.value_read, moving)
        pins: tuple[Pins, ...] = (NOTHING_PINNED,)
        free, lent = min(triggers, values), (0, 0)
        if cache and not cache_tokens:
            lent = self._lent(moving, triggers, values) if self._lendable_bytes else lent
            of_triggers, of_values = (
                PartSlots(part=part, count=own + more, moving=moving, reserved=reserved, slot_bytes=size, lent=more)
                for part, own, more, reserved, size in (
                    ("trigger", triggers, lent[0], reserved_triggers, self._trigger_bytes),
                    ("value", values, lent[1], reserved_values, self._value_bytes),
                )
            )
            slots = of_triggers, of_values
            made = allocate_pins(
                self._manifest, self._rates, self._mode, whole=self._whole, texts=self._texts, slots=slots
            )
            pins, free = made.pins, self._least_free(slots, made.most)
            reasons += made.reasons
        if self._mixture and free >= OPEN_LAYER_FROM * self._experts * self._layout.clusters:
            window_blocks = self._experts * self._layout.blocks
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
            lent_triggers=lent[0],
            lent_values=lent[1],
        )

    def _lent(self, moving: int, triggers: int, values: int) -> tuple[int, int]:
        """Slots in memory that is lent besides: as if there was as much more of it."""
        taken_bytes = triggers * self._trigger_bytes + values * self._value_bytes
        more = self._share_out(taken_bytes + self._lendable_bytes, moving)
        return max(0, more[0] - triggers), max(0, more[1] - values)

    def _share_out(self, budget: int, moving: int) -> tuple[int, int]:
        """Slots of either part: as many of both, or all triggers first."""
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
        """Return the blocks of a layer that are open at once, and the clusters that may be moving: those open for any
        worker, and as many again that are free or arriving. A whole layer, where memory holds two; less only where it
        must be, since the reads of a block window wait for the one before it. Workers may have neighbouring ones open,
        and of two experts, but not of two layers.

        Slots for a larger window come from memory that was added, never from what stays: before it opens, `moving`
        grows to what it needs while what stays keeps its size. Else more memory would be slower."""
        (window_blocks, moving, _), *larger = self._windows()
        opened_bytes = 0  # the budget with which the window before opened
        for blocks, needed, from_bytes in larger:
            from_bytes = max(from_bytes, opened_bytes)
            if budget < from_bytes:
                break
            staying_bytes = from_bytes - moving * self._both_bytes
            opened_bytes = max(from_bytes, staying_bytes + needed * self._both_bytes)
            if budget < opened_bytes:
                return window_blocks, max(moving, (budget - staying_bytes) // self._both_bytes)
            window_blocks, moving = blocks, needed
        if moving >= self._all:
            moving, window_blocks = min(self._all, max(self._moving(1), self._all // 2)), 1
        return window_blocks, moving

    def _windows(self) -> list[tuple[int, int, int]]:
        """Return the block windows that may be planned, smallest first: blocks, clusters that may be moving, and the
        bytes for slots from which on it is wanted: three times what is moving, two times for a whole layer."""
        workers, blocks = self._workers, self._layout.blocks
        parts = [max(1, blocks // (2 * workers))]
        while parts[-1] > 1:
            parts.append((parts[-1] + 1) // 2)
        windows = [(part, self._moving(part), 3 * self._moving(part) * self._both_bytes) for part in reversed(parts)]
        moving = 2 * self._layout.clusters * (workers if self._mixture else 1)
        return [*windows, (blocks, moving, 2 * moving * self._both_bytes)]

    def _moving(self, window_blocks: int) -> int:
        """Return the clusters that may be moving while every worker has such a part of a layer open."""
        return 2 * window_blocks * self._workers * self._layout.block_clusters

    def _least_free(self, slots: tuple[PartSlots, PartSlots], pinned: tuple[int, int]) -> int:
        """Slots of either part that nothing stays in; a part that is all there counts as what a whole model has."""
        free = (
            one.count if one.count == self._all else one.count - staying
            for one, staying in zip(slots, pinned, strict=True)
        )
        return min(free)

    def _reserved(self, slots: int, share: float, moving: int) -> int:
        """Twice what one token is expected to miss, within MAX_STOCK and half of what may move; none where nothing is
        evicted."""
        if slots == self._all:
            return 0
        wanted = self._rates.chosen * touched_share(share, self._layout.cluster_neurons) * self._all
        missed = wanted * (1 - self._rates.activations_within(slots / self._all))
        return min(moving // 2, max(MIN_STOCK, min(int(STOCK_FACTOR * missed), int(MAX_STOCK * slots))))
