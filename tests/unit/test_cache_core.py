"""The cache's bookkeeping: slots are free, granted or in use, and never two of these."""

from __future__ import annotations

from neuronpipe.services.cache.core import FreeSlots, Region


def region(slots: int, stock: int = 2, pinned: int = 1) -> Region:
    return Region(part=0, slots=slots, stock=stock, words=12, clusters_per_layer=4, pinned_per_layer=pinned)


def nothing_to_evict(want: int) -> list[int]:
    raise AssertionError(f"asked to evict {want}")


def test_pinned_and_warm_clusters_are_the_first_of_each_layer_and_leave_the_stock_free() -> None:
    r = region(slots=9)
    assert r.pinned_words() == [0, 4, 8]
    assert r.warm_words() == [1, 5, 9]
    assert len(r.pinned_words()) + len(r.warm_words()) + r.stock <= r.slots


def test_after_a_reset_a_slot_is_either_named_by_a_word_or_free() -> None:
    slots = FreeSlots(region(slots=6))
    slots.restart(used=[1, 4])
    assert slots.take(99) == [0, 2, 3, 5]


def test_grants_fill_the_stock_and_what_waits_and_free_slots_go_before_evictions() -> None:
    slots = FreeSlots(region(slots=6))
    slots.restart(used=[0, 1, 2])
    assert slots.grant(free=0, waiting=0, received=0, evict=nothing_to_evict) == [3, 4]
    assert slots.grant(free=0, waiting=2, received=2, evict=lambda want: [0, 1, 2][:want]) == [5, 0, 1, 2]


def test_what_is_on_its_way_is_not_granted_twice() -> None:
    slots = FreeSlots(region(slots=6))
    slots.restart(used=[])
    assert len(slots.grant(free=0, waiting=1, received=0, evict=nothing_to_evict)) == 3
    assert slots.grant(free=0, waiting=1, received=0, evict=nothing_to_evict) == []


def test_a_region_that_holds_everything_is_granted_at_once_and_never_evicts() -> None:
    slots = FreeSlots(region(slots=12, stock=0, pinned=4))
    slots.restart(used=[])
    assert len(slots.grant(free=0, waiting=0, received=0, evict=nothing_to_evict)) == 12
    assert slots.grant(free=0, waiting=5, received=12, evict=nothing_to_evict) == []
