"""Cache and loader agree on the slots whatever of their messages is lost or late, and no demand is forgotten."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from neuronpipe.native import lib
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.channel import Connection, Listener, open_context
from neuronpipe.protocol.links import CACHE, CONTROL
from neuronpipe.protocol.messages.cache import ResetDone, SlotCounts
from neuronpipe.protocol.messages.lifecycle import Drain
from neuronpipe.protocol.messages.loader import Grant, Reset
from neuronpipe.services.cache.cache_service import CacheService
from neuronpipe.services.loader.loader_service import LoaderService
from neuronpipe.services.runtime.run_memory import Rings

from tests.pipeline import eventually
from tests.service_job import make_job

PATIENCE_MS = 5000


@pytest.fixture(scope="module")
def package(converted: Callable[..., Package]) -> Package:
    return converted("relu2", "q8")


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short path, for sockets."""
    return tmp_path_factory.mktemp("s")


@contextmanager
def serving(service: CacheService | LoaderService, peer: str, control: Listener) -> Iterator[None]:
    """Serve in a thread, until drained."""
    thread = threading.Thread(target=service.serve)
    thread.start()
    assert control.receive(PATIENCE_MS) is not None  # Hello: it can be reached
    try:
        yield
    finally:
        control.send(peer, Drain())
        thread.join(10)
    assert not thread.is_alive()


def packed(*numbers: int) -> bytes:
    return array("I", numbers).tobytes()


def counts(loader: Connection) -> SlotCounts:
    """What the loader says next of its counts; nothing else may come before."""
    message = loader.receive(PATIENCE_MS)
    assert isinstance(message, SlotCounts), message
    return message


def test_a_stock_settles_the_cache_when_the_answer_to_its_reset_was_lost(package: Package, folder: Path) -> None:
    job, _ = make_job("cache", package, folder)
    with open_context() as context:
        control = Listener(context, CONTROL, job.endpoints["control"])
        loader = Listener(context, CACHE, job.endpoints["cache"])
        with serving(CacheService(job), "cache-0", control):
            assert loader.receive(PATIENCE_MS) == ("cache-0", Reset(generation=1))
            loader.send("cache-0", SlotCounts(generation=1, trigger_free=0, value_free=0))
            first = loader.receive(PATIENCE_MS)
            assert first is not None
            assert isinstance(first[1], Grant)
            granted = [{*array("I", first[1].slots)}, set[int]()]
            loader.send("cache-0", ResetDone(generation=1))  # it was only late
            while (received := loader.receive(300)) is not None:
                if isinstance(received[1], Grant):
                    slots = {*array("I", received[1].slots)}
                    assert not slots & granted[received[1].part]
                    granted[received[1].part] |= slots
            assert all(granted)


def test_a_loader_keeps_its_slots_when_a_reset_comes_late(package: Package, folder: Path) -> None:
    job, _ = make_job("loader", package, folder)
    with open_context() as context:
        control = Listener(context, CONTROL, job.endpoints["control"])
        cache = Connection(context, CACHE, job.endpoints["cache"], "cache-0")
        with serving(LoaderService(job), "loader-0", control):
            cache.send(Reset(generation=2))
            while (answer := cache.receive(PATIENCE_MS)) != ResetDone(generation=2):
                assert isinstance(answer, SlotCounts)
            assert counts(cache).trigger_granted == 0
            cache.send(Grant(generation=2, part=0, slots=packed(4, 5)))
            assert counts(cache).trigger_free == 2
            for late in (1, 2):
                cache.send(Reset(generation=late))
            cache.send(Grant(generation=2, part=0, slots=packed(6)))
            said = counts(cache)
            assert (said.generation, said.trigger_free, said.trigger_granted) == (2, 3, 3)


def test_a_cache_says_once_that_no_slot_can_be_freed(package: Package, folder: Path) -> None:
    """Else the loader would wait for both slots of a cluster that lacks one, while windows hold all of them."""
    job, _ = make_job("cache", package, folder)
    with open_context() as context:
        control = Listener(context, CONTROL, job.endpoints["control"])
        loader = Listener(context, CACHE, job.endpoints["cache"])
        with serving(CacheService(job), "cache-0", control):
            assert loader.receive(PATIENCE_MS) == ("cache-0", Reset(generation=1))
            loader.send("cache-0", ResetDone(generation=1))
            granted, empty = [0, 0], [0, 0]
            for _ in range(3):
                while (received := loader.receive(200)) is not None:
                    if isinstance(received[1], Grant):
                        granted[received[1].part] += len(received[1].slots) // 4
                        empty[received[1].part] += not received[1].slots
                # They are used up, and no residency entry names one that could be evicted.
                triggers, values = granted
                loader.send(
                    "cache-0",
                    SlotCounts(
                        generation=1,
                        trigger_free=0,
                        value_free=0,
                        value_waiting=100_000,
                        trigger_granted=triggers,
                        value_granted=values,
                    ),
                )
            assert all(granted)
            assert empty == [0, 1]


def test_a_demand_from_before_the_reset_is_loaded_after_it(package: Package, folder: Path) -> None:
    job, memory = make_job("loader", package, folder)
    words = memory.view("residency", "trigger_entries")
    with open_context() as context:
        control = Listener(context, CONTROL, job.endpoints["control"])
        cache = Connection(context, CACHE, job.endpoints["cache"], "cache-0")
        worker = Rings(memory, job.doorbell).of(0)
        with serving(LoaderService(job), "loader-0", control):
            assert lib.np_requests_put(worker, [3 | lib.NP_REQUEST_TRIGGER], 1) == 1
            while counts(cache).trigger_waiting == 0:
                pass
            cache.send(Reset(generation=1))
            while (answer := cache.receive(PATIENCE_MS)) != ResetDone(generation=1):
                assert isinstance(answer, SlotCounts)
            cache.send(Grant(generation=1, part=0, slots=packed(7)))
            assert eventually(lambda: words[3] & lib.NP_ENTRY_STATE_MASK == lib.NP_ENTRY_PRESENT, 5)
            assert words[3] & lib.NP_ENTRY_SLOT_MASK == 7
