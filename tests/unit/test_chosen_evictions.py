"""Eviction of chosen clusters, by which a cache policy of one's own frees slots."""

from __future__ import annotations

from array import array

from neuronpipe.native import ffi, lib

PRESENT, PINNED, LOADING, REFERENCED = (
    lib.NP_ENTRY_PRESENT,
    lib.NP_ENTRY_PINNED,
    lib.NP_ENTRY_LOADING,
    lib.NP_ENTRY_REFERENCED,
)


def evict(words: array[int], clusters: list[int], count: int, window: tuple[int, int] = (0, 0)) -> list[int]:
    windows = array("Q", [window[0] << 32 | window[1]])
    slots = ffi.new("uint32_t[]", max(1, count))
    evicted = lib.np_clusters_evict(
        ffi.from_buffer("uint32_t[]", words),
        len(words),
        ffi.from_buffer("uint32_t[]", array("I", clusters)),
        len(clusters),
        ffi.from_buffer("uint64_t[]", windows),
        1,
        count,
        slots,
    )
    return list(slots[0:evicted])


def test_chosen_clusters_leave_in_the_order_of_choice_up_to_the_count() -> None:
    words = array("I", [PRESENT | 10, PRESENT | 11, PRESENT | 12 | REFERENCED, PRESENT | 13])
    assert evict(words, [2, 0, 3], 2) == [12, 10]
    assert [word & lib.NP_ENTRY_STATE_MASK == PRESENT for word in words] == [False, True, False, True]


def test_pinned_loading_absent_and_unknown_clusters_are_passed_over() -> None:
    words = array("I", [PRESENT | PINNED | 1, LOADING | 2, 0, PRESENT | 4])
    before = words[:3]
    assert evict(words, [0, 1, 2, 99, 0xFFFFFFFF, 3], 5) == [4]
    assert words[:3] == before


def test_a_cluster_that_a_worker_reads_is_not_evicted() -> None:
    words = array("I", [PRESENT | 1, PRESENT | 2])
    assert evict(words, [0, 1], 2, window=(0, 1)) == [2]
    assert words[0] & lib.NP_ENTRY_STATE_MASK == PRESENT
