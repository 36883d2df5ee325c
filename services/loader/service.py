"""The loader: the only process that reads flash for neurons. One queue, direct I/O, deep submission.

Workers send lists of clusters, the cache sends free slots. The native loader claims the clusters' words, reads into
the slots, verifies checksums, publishes the words and wakes the waiters; Python only carries messages to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from array import array
from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.protocol.channel import Listener, open_context
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.errors import Full, Lost, UserError
from neuronpipe.protocol.layouts import BOARD_FLASH
from neuronpipe.protocol.links import CACHE, LOADER
from neuronpipe.protocol.messages.cache import ResetDone, Stock
from neuronpipe.protocol.messages.loader import Fetch, Grant, Reset, Warm
from neuronpipe.services.job import Job
from neuronpipe.services.loader.fixed import load_fixed
from neuronpipe.services.memory import RunMemory
from neuronpipe.services.parts import GATE, PREFETCH, REST, WARM_UP
from neuronpipe.services.service import Service

UNKNOWN_GENERATION_MS = 50
log = logging.getLogger(__name__)


class Core:
    """The native loader over this process's mappings."""

    def __init__(self, job: Job, memory: RunMemory) -> None:
        manifest, flash = job.package.manifest, job.plan.flash
        error = ffi.new("int *")
        path = str(job.package.bundles_path).encode()
        self._reader = lib.np_reader_open(path, flash.engine.encode(), flash.depth, error)
        if self._reader == ffi.NULL and flash.engine != "threads":
            log.warning("%s is refused here (errno %d); reading with threads", flash.engine, error[0])
            self._reader = lib.np_reader_open(path, b"threads", flash.depth, error)
        if self._reader == ffi.NULL:
            raise UserError(f"{job.package.bundles_path}: cannot be opened for reading (errno {error[0]})")
        table = array("I", job.package.checksums())
        self._keep: list[Any] = [array("I", table[0::2]), array("I", table[1::2])]
        layout = manifest.layout
        parts = ffi.new(
            "np_loader_part[2]",
            [
                {
                    "base_offset": 0,
                    "stride_bytes": layout.cluster_stride_bytes,
                    "part_offset": part_offset,
                    "part_bytes": part_bytes,
                    "slot_count": slot_count,
                    "slots": ffi.cast("uint8_t *", ffi.from_buffer(memory.view("slots", slots))),
                    "words": ffi.cast("uint32_t *", ffi.from_buffer(memory.view("residency", words))),
                    "cluster_count": manifest.words,
                    "checksums": ffi.cast("uint32_t *", ffi.from_buffer(checksums)),
                }
                for part_offset, part_bytes, slot_count, slots, words, checksums in (
                    (0, layout.gate_part_bytes, job.plan.memory.gate_slots, "gate_slots", "gate_words", self._keep[0]),
                    (
                        layout.gate_part_bytes,
                        layout.rest_part_bytes,
                        job.plan.memory.rest_slots,
                        "rest_slots",
                        "rest_words",
                        self._keep[1],
                    ),
                )
            ],
        )
        arrivals = ffi.cast("uint32_t *", ffi.from_buffer(memory.view("residency", "arrivals")))
        self._keep += [parts, memory]
        self._loader = lib.np_loader_create(self._reader, parts, arrivals, manifest.words + 64)
        if self._loader == ffi.NULL:
            raise UserError(
                f"{job.package.bundles_path}: the layout does not suit direct reads here, or memory is short"
            )
        self._state = ffi.new("np_loader_state *")

    @property
    def event_fd(self) -> int:
        """Readable when reads are complete."""
        return int(lib.np_reader_event_fd(self._reader))

    def request(self, part: int, clusters: bytes, priority: int, flags: int = 0) -> None:
        """Queue clusters; those that are there or on their way are passed over."""
        count = len(clusters) // 4
        taken = lib.np_loader_request(
            self._loader, part, ffi.from_buffer("uint32_t[]", clusters), count, priority, flags
        )
        if taken < 0:
            log.error("a message named clusters outside the package; dropped")
        elif taken < count:
            log.warning("the loader's queue is full: %d of %d clusters dropped", count - taken, count)

    def grant(self, part: int, slots: bytes) -> None:
        """Take over free slots."""
        if lib.np_loader_grant(self._loader, part, ffi.from_buffer("uint32_t[]", slots), len(slots) // 4) < 0:
            raise RuntimeError("the cache granted a slot that does not exist or is in use")

    def turn(self) -> Any:
        """Submit, reap, publish; returns the state after it."""
        while lib.np_loader_turn(self._loader, 0) > 0:
            pass
        lib.np_loader_read_state(self._loader, self._state)
        return self._state

    def reset(self) -> None:
        """Forget slots and all that is queued but demands; finish what is in flight."""
        lib.np_loader_reset(self._loader)


class LoaderService:
    """The messages around the native loader."""

    def __init__(self, job: Job) -> None:
        self._memory = RunMemory.open("loader", job.segments)
        self._context = open_context()
        self._service = Service(self._context, job, slots=0, available=False)
        self._workers = Listener(self._context, LOADER, job.endpoints["loader"])
        self._cache = Listener(self._context, CACHE, job.endpoints["cache"])
        load_fixed(job.package, self._memory.segments["fixed"])
        self._core = Core(job, self._memory)
        self._board = self._memory.view("board", "flash")
        self._epoch = ffi.from_buffer("uint32_t[]", self._memory.view("exchange", "epoch"))
        loaded = ffi.from_buffer("uint32_t[]", self._memory.view("residency", "loaded"))
        lib.np_word_store(loaded, 1)
        lib.np_word_wake(loaded)
        self._generation = 0
        self._granted = [0, 0]
        self._told: Stock | None = None

    def serve(self) -> None:
        """Serve until drained."""
        self._service.add(self._workers, self._from_workers)
        self._service.add(self._cache, self._from_cache)
        self._service.add(self._core.event_fd, self._drain_event)
        self._service.serve(lambda message: None, self._turn)
        self._context.close()

    def _turn(self) -> int | None:
        """Before each wait: move reads along, tell the cache what is left, show the counters."""
        state = self._core.turn()
        stock = Stock(
            generation=self._generation,
            gate_free=state.free_slots[GATE],
            rest_free=state.free_slots[REST],
            gate_waiting=state.waiting[GATE],
            rest_waiting=state.waiting[REST],
            gate_granted=self._granted[GATE],
            rest_granted=self._granted[REST],
        )
        if stock != self._told or self._generation == 0:
            self._told = stock
            self._tell(stock)
        for index, name in enumerate(BOARD_FLASH):
            self._board[index] = getattr(state, name)
        return UNKNOWN_GENERATION_MS if self._generation == 0 else None

    def _from_workers(self) -> None:
        while (received := self._workers.receive()) is not None:
            _, fetch = received
            assert isinstance(fetch, Fetch)
            stale = fetch.epoch != lib.np_word_load(self._epoch)
            self._core.request(fetch.part, fetch.clusters, PREFETCH if stale else fetch.priority)

    def _from_cache(self) -> None:
        while (received := self._cache.receive()) is not None:
            _, message = received
            if isinstance(message, Reset):
                if message.generation <= self._generation:
                    continue  # a late one: its slots are granted already
                self._core.reset()
                self._generation, self._told, self._granted = message.generation, None, [0, 0]
                self._tell(ResetDone(generation=message.generation))
                self._service.become_available()
            elif message.generation == self._generation:  # type: ignore[attr-defined]
                self._take(message)

    def _take(self, message: Message) -> None:
        if isinstance(message, Grant):
            self._core.grant(message.part, message.slots)
            self._granted[message.part] += len(message.slots) // 4
        elif isinstance(message, Warm):
            self._core.request(message.part, message.clusters, WARM_UP, lib.NP_WORD_PINNED if message.pinned else 0)

    def _tell(self, message: Message) -> None:
        try:
            self._cache.send("cache-0", message)
        except (Lost, Full):
            self._told = None  # the cache is not there yet, or again; the next turn tells it

    def _drain_event(self) -> None:
        """Take the notice; the turn before the next wait reaps what it announced."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._core.event_fd, 8)


def main(job: Job) -> None:
    """Serve until drained."""
    LoaderService(job).serve()
