"""The cache's bookkeeping: slots are free, granted or in use, and never two of these."""

from __future__ import annotations

import tracemalloc
from array import array

from neuronpipe.protocol.codec import MAX_FRAME_BYTES
from neuronpipe.services.cache.core import FreeSlots, Region, packed


def region(slots: int, stock: int = 2, pinned: int = 1) -> Region:
    return Region(part=0, slots=slots, stock=stock, words=12, clusters_per_layer=4, pinned_per_layer=pinned)


def nothing_to_evict(want: int) -> array[int]:
    raise AssertionError(f"asked to evict {want}")


def test_pinned_and_warm_clusters_are_the_first_of_each_layer_and_leave_the_stock_free() -> None:
    r = region(slots=9)
    assert list(r.pinned_words()) == [0, 4, 8]
    assert list(r.warm_words()) == [1, 5, 9]
    assert len(r.pinned_words()) + len(r.warm_words()) + r.stock <= r.slots


def test_after_a_reset_a_slot_is_either_named_by_a_word_or_free() -> None:
    slots = FreeSlots(region(slots=6))
    slots.restart(used=[1, 4])
    assert list(slots.take(0)) == []
    assert list(slots.take(99)) == [0, 2, 3, 5]


def test_grants_fill_the_stock_and_what_waits_and_free_slots_go_before_evictions() -> None:
    slots = FreeSlots(region(slots=6))
    slots.restart(used=[0, 1, 2])
    assert list(slots.grant(free=0, waiting=0, received=0, evict=nothing_to_evict)) == [3, 4]
    granted = slots.grant(free=0, waiting=2, received=2, evict=lambda want: array("I", [0, 1, 2][:want]))
    assert list(granted) == [5, 0, 1, 2]


def test_what_is_on_its_way_is_not_granted_twice() -> None:
    slots = FreeSlots(region(slots=6))
    slots.restart(used=[])
    assert len(slots.grant(free=0, waiting=1, received=0, evict=nothing_to_evict)) == 3
    assert not slots.grant(free=0, waiting=1, received=0, evict=nothing_to_evict)


def test_a_region_that_holds_everything_is_granted_at_once_and_never_evicts() -> None:
    slots = FreeSlots(region(slots=12, stock=0, pinned=4))
    slots.restart(used=[])
    assert len(slots.grant(free=0, waiting=0, received=0, evict=nothing_to_evict)) == 12
    assert not slots.grant(free=0, waiting=5, received=12, evict=nothing_to_evict)


def test_the_bookkeeping_takes_about_five_bytes_per_slot() -> None:
    count = 100_000
    whole = Region(part=0, slots=count, stock=0, words=count, clusters_per_layer=count, pinned_per_layer=count)
    tracemalloc.start()
    slots = FreeSlots(whole)
    slots.restart(used=range(0, count, 7))
    words = whole.pinned_words()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(words) == count
    assert peak_bytes < 12 * count  # four for the words, five for the slots, and what an array grows ahead


def test_however_many_there_are_each_piece_fits_a_message() -> None:
    ids = array("I", range(5_000_000))
    pieces = list(packed(ids))
    assert b"".join(pieces) == ids.tobytes()
    assert max(len(piece) for piece in pieces) < MAX_FRAME_BYTES - 1024
    assert list(packed(array("I"))) == []
