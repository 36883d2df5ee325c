"""The cache's bookkeeping: slots are free, granted or in use, and never two of these."""

from __future__ import annotations

import dataclasses
import tracemalloc
from array import array
from collections.abc import Iterable
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st
from neuronpipe.protocol.codec import MAX_FRAME_BYTES
from neuronpipe.services.cache.residency import (
    GROW_AFTER_S,
    MAX_IDS_PER_MESSAGE,
    SHRINK_AFTER_S,
    FreeSlots,
    PinTable,
    Region,
    packed,
    warm_ups,
)


def region(
    slots: int, reserve: int = 2, pinned: tuple[int, ...] = (1, 1, 1), part: Literal[0, 1] = 0, clusters: int = 12
) -> Region:
    return Region(part=part, slots=slots, reserve=reserve, clusters=clusters, pinned=pinned)


def free_but(used: Iterable[int], slots: int) -> bytearray:
    free = bytearray(b"\1") * slots
    for slot in used:
        free[slot] = 0
    return free


def nothing_to_evict(want: int) -> array[int]:
    raise AssertionError(f"asked to evict {want}")


def test_the_first_clusters_of_each_layer_are_warmed_up_and_leave_the_stock_free() -> None:
    triggers, values = region(slots=9), region(slots=9, part=1)
    first, second = warm_ups(triggers, values)
    assert (first.parts, first.pinned, list(first)) == (3, True, [0, 4, 8])
    assert (second.parts, second.pinned, list(second)) == (3, False, [1, 2, 5, 9])
    assert len(first) + len(second) + triggers.reserve <= triggers.slots


def test_what_an_accelerator_computes_is_not_warmed_up_unless_everything_stays() -> None:
    triggers, values = (
        dataclasses.replace(region(slots=7, pinned=(0, 0, 0), part=part), offloaded=2)  # type: ignore[arg-type]
        for part in (0, 1)
    )
    (warm,) = warm_ups(triggers, values)
    assert (warm.parts, warm.pinned, list(warm)) == (3, False, [2, 3, 6, 7, 10])
    everything = [
        dataclasses.replace(one, slots=12, reserve=0, pinned=(4, 4, 4), part=part)  # type: ignore[arg-type]
        for part, one in enumerate((triggers, values))
    ]
    (warm,) = warm_ups(*everything)
    assert (warm.pinned, len(warm)) == (True, 12)


pins = st.tuples(*[st.integers(0, 4)] * 3)


@given(*[st.builds(region, slots=st.integers(2, 14), pinned=pins, part=st.just(part)) for part in (0, 1)])
def test_every_part_worth_having_is_asked_for_once_and_pairs_together(triggers: Region, values: Region) -> None:
    asked: list[list[tuple[int, bool]]] = [[], []]
    together = set()
    for warm in warm_ups(triggers, values):
        for part in (0, 1):
            if warm.parts & 1 << part:
                asked[part] += [(word, warm.pinned) for word in warm]
        if warm.parts == 3:
            together |= {(word, warm.pinned) for word in warm}
    for part, one in enumerate((triggers, values)):
        wanted = [
            (ffn * 4 + n, n < pinned)
            for ffn, (pinned, warm) in enumerate(zip(one.pinned, one.warm(), strict=True))
            for n in range(warm)
        ]
        assert sorted(asked[part]) == sorted(wanted)
    assert together == set(asked[0]) & set(asked[1])


def test_after_a_reset_a_slot_is_either_named_by_a_word_or_free() -> None:
    slots = FreeSlots(region(slots=6))
    slots.restart(free_but([1, 4], slots.region.slots))
    assert list(slots.take(0)) == []
    assert list(slots.take(99)) == [0, 2, 3, 5]


def test_what_memory_has_besides_the_pins_is_warmed_up_alike_where_little_stays() -> None:
    assert region(slots=9, pinned=(0, 4, 1)).warm() == (2, 4, 1)
    assert region(slots=11, pinned=(0, 4, 1)).warm() == (3, 4, 2)
    assert region(slots=12, reserve=0, pinned=(0, 0, 0)).warm() == (4, 4, 4)


def test_experts_of_one_cluster_are_warmed_up_evenly_among_all_layers() -> None:
    """They were not at all, unless every one had a slot: no layer could have one cluster of each expert."""
    experts = Region(part=0, slots=8, reserve=2, clusters=12, pinned=(0,) * 12)
    assert experts.warm() == (1, 0) * 6
    assert dataclasses.replace(experts, slots=13).warm() == (1,) * 11 + (0,)
    assert sum(dataclasses.replace(experts, slots=11).warm()) == 9


@given(used=st.sets(st.integers(0, 29)), counts=st.lists(st.integers(0, 9)))
def test_free_slots_are_taken_once_each_from_the_lowest_on(used: set[int], counts: list[int]) -> None:
    slots = FreeSlots(region(slots=30))
    slots.restart(free_but(used, slots.region.slots))
    taken = [slot for count in counts for slot in slots.take(count)]
    assert taken == [slot for slot in range(30) if slot not in used][: sum(counts)]


def test_grants_fill_the_stock_and_what_waits_and_free_slots_go_before_evictions() -> None:
    slots = FreeSlots(region(slots=6))
    slots.restart(free_but([0, 1, 2], slots.region.slots))
    assert list(slots.grant(free=0, waiting=0, received=0, evict=nothing_to_evict)) == [3, 4]
    granted = slots.grant(free=0, waiting=2, received=2, evict=lambda want: array("I", [0, 1, 2][:want]))
    assert list(granted) == [5, 0, 1, 2]


def test_what_is_on_its_way_is_not_granted_twice() -> None:
    slots = FreeSlots(region(slots=6))
    slots.restart(free_but([], slots.region.slots))
    assert len(slots.grant(free=0, waiting=1, received=0, evict=nothing_to_evict)) == 3
    assert not slots.grant(free=0, waiting=1, received=0, evict=nothing_to_evict)


def test_a_region_that_holds_everything_is_granted_at_once_and_never_evicts() -> None:
    slots = FreeSlots(region(slots=12, reserve=0, pinned=(4, 4, 4)))
    slots.restart(free_but([], slots.region.slots))
    assert list(slots.grant(free=0, waiting=0, received=0, evict=nothing_to_evict)) == list(range(12))
    assert not list(slots.grant(free=0, waiting=5, received=12, evict=nothing_to_evict))


def test_the_bookkeeping_takes_a_byte_per_slot_and_a_message_at_a_time() -> None:
    count = 1_000_000  # the ids of several messages
    whole = region(slots=count, reserve=0, clusters=count, pinned=(count,))
    tracemalloc.start()
    slots = FreeSlots(whole)
    slots.restart(free_but(range(0, count, 7), slots.region.slots))
    granted = sum(len(piece) for piece in packed(slots.take(count))) // 4
    (warm,) = warm_ups(whole, dataclasses.replace(whole, part=1))
    asked = sum(len(piece) for piece in packed(warm)) // 4
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (granted, asked) == (count - len(range(0, count, 7)), count)
    assert peak_bytes < 2 * count + 4 * 4 * MAX_IDS_PER_MESSAGE


def test_however_many_there_are_each_piece_fits_a_message() -> None:
    ids = array("I", range(1_000_000))
    pieces = list(packed(ids))
    assert b"".join(pieces) == ids.tobytes()
    assert max(len(piece) for piece in pieces) < MAX_FRAME_BYTES - 1024
    assert list(packed(array("I"))) == []


def entries_seen(looks: list[tuple[float, int]], entries: tuple[int, ...] = (1, 2, 4)) -> list[int]:
    following = PinTable(entries, 1)
    seen = []
    for now_s, texts in looks:
        following.update(texts, now_s)
        seen.append(following.entry)
    return seen


def test_pins_follow_a_batch_that_lasts() -> None:
    grown = [(0.0, 1), (1.0, 3), (1.0 + GROW_AFTER_S, 4), (2.0, 4), (2.0 + GROW_AFTER_S, 4)]
    assert entries_seen(grown) == [0, 0, 1, 1, 2]  # while three and four were seen, what three need
    shrunk = [(0.0, 4), (GROW_AFTER_S, 4), (10.0, 1), (9.9 + SHRINK_AFTER_S, 1), (10.0 + SHRINK_AFTER_S, 1)]
    assert entries_seen(shrunk) == [0, 2, 2, 2, 0]


def test_a_batch_that_flickers_or_rests_changes_nothing() -> None:
    assert set(entries_seen([(n * 0.1, 1 + 3 * (n % 2)) for n in range(200)])) == {0}
    assert entries_seen([(0.0, 4), (GROW_AFTER_S, 4), (100.0, 0), (200.0, 0)])[1:] == [2, 2, 2]


def test_a_cache_that_starts_in_the_middle_takes_what_the_batch_has() -> None:
    assert [PinTable((1, 2, 4), texts).entry for texts in (0, 1, 2, 3, 4, 9)] == [0, 0, 1, 1, 2, 2]


def test_new_slots_are_free_and_those_that_are_to_go_are_granted_to_nobody() -> None:
    slots = FreeSlots(region(slots=6, reserve=0))
    slots.restart(free_but([0, 1, 2, 3, 4, 5], 6))
    slots.resize(9, (1, 1, 1))
    assert list(slots.take(9)) == [6, 7, 8]
    slots.resize(4, (1, 1, 1))
    granted = slots.grant(free=0, waiting=4, received=3, evict=lambda want: array("I", [5, 3, 8, 1][:want]))
    assert list(granted) == [3, 1]


def test_a_region_that_had_everything_keeps_a_few_slots_free_when_it_has_not() -> None:
    slots = FreeSlots(region(slots=1200, reserve=0, clusters=1200, pinned=(400, 400, 400)))
    slots.resize(1000, (300, 300, 300))
    assert slots.region.reserve == 1000 // 64
    slots.resize(1200, (400, 400, 400))
    assert slots.region.holds_everything
