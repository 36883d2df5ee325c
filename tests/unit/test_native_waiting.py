"""Waits on shared words as Python uses them: they let other threads run, and an epoch ends them."""

import mmap
import os
import threading
from typing import Any

import pytest
from neuronpipe.native import ffi, lib


@pytest.fixture
def words() -> Any:
    """A page of shared words, seen through a memfd as processes see it."""
    descriptor = os.memfd_create("words")
    os.ftruncate(descriptor, mmap.PAGESIZE)
    page = mmap.mmap(descriptor, mmap.PAGESIZE)
    os.close(descriptor)
    view = ffi.from_buffer("uint32_t[]", page)
    yield view
    ffi.release(view)
    page.close()


@pytest.mark.parametrize("spin_us", [0, 50_000])
def test_a_wait_lets_other_threads_run(words: Any, spin_us: int) -> None:
    word, epoch = words, words + 1
    results: list[int] = []
    waiter = threading.Thread(target=lambda: results.append(lib.np_word_wait(word, 0, epoch, 0, spin_us, 20_000)))
    waiter.start()
    lib.np_word_store(word, 5)
    lib.np_word_wake(word)
    waiter.join(timeout=20)
    assert results == [lib.NP_OK]


def test_an_epoch_ends_every_wait(words: Any) -> None:
    epoch, word, barrier = words, words + 1, ffi.cast("np_barrier *", words + 16)
    results: list[int] = []
    waiters = [
        threading.Thread(target=lambda: results.append(lib.np_word_wait(word, 0, epoch, 0, 0, 0))),
        threading.Thread(target=lambda: results.append(lib.np_barrier_wait(barrier, 2, epoch, 0, 0, 0))),
    ]
    for waiter in waiters:
        waiter.start()
    phase = ffi.addressof(barrier[0], "phase")
    assert lib.np_epoch_advance(epoch, [word, phase], 2) == 1
    for waiter in waiters:
        waiter.join(timeout=20)
    assert results == [lib.NP_E_EPOCH] * 2


def test_a_barrier_has_one_last_participant(words: Any) -> None:
    epoch, barrier = words, ffi.cast("np_barrier *", words + 16)
    results: list[int] = []

    def meet() -> None:
        results.extend(lib.np_barrier_wait(barrier, 3, epoch, 0, 20, 20_000) for _ in range(200))

    participants = [threading.Thread(target=meet) for _ in range(3)]
    for participant in participants:
        participant.start()
    for participant in participants:
        participant.join(timeout=60)
    assert sorted(results) == [0] * 400 + [1] * 200


def test_a_wait_has_a_time_limit(words: Any) -> None:
    assert lib.np_word_wait(words, 0, words + 1, 0, 0, 5) == lib.NP_E_TIMEOUT
    assert lib.np_word_wait(words, 0, words + 1, 1, 0, 5) == lib.NP_E_EPOCH
