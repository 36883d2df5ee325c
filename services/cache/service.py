"""The cache: decides which clusters stay. It evicts ahead of need, so that the loader always has free slots.

It keeps nothing that dies with it: which slot holds what is in the residency entries. A cache that starts (again)
resets the loader, reads the words, and knows everything it needs.
"""

from __future__ import annotations

import functools
import time
from array import array
from collections.abc import Iterable
from typing import Any, Final, Literal

from neuronpipe.native import ffi, lib
from neuronpipe.protocol.channel import Connection, open_context
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.links import CACHE
from neuronpipe.protocol.messages.cache import ResetDone, SlotCounts
from neuronpipe.protocol.messages.loader import Grant, Reset, Warm
from neuronpipe.protocol.residency import TRIGGER, VALUE
from neuronpipe.services import trace
from neuronpipe.services.cache.core import FreeSlots, Region, WarmUp, packed, warm_ups
from neuronpipe.services.job import Job
from neuronpipe.services.memory import RunMemory
from neuronpipe.services.service import Service
from neuronpipe.services.trace import Trace

RETRY_MS = 1
LOST_AFTER_S = 1.0
NAMES = ("trigger_entries", "value_entries")
PARTS: Final[tuple[Literal[0, 1], ...]] = (TRIGGER, VALUE)


class CacheService:
    """The messages around the bookkeeping."""

    def __init__(self, job: Job) -> None:
        self._memory = RunMemory.open("cache", job.segments)
        self._trace = Trace.of(job, self._memory)
        self._context = open_context()
        self._service = Service(self._context, job, slots=0, available=False)
        self._link = Connection(self._context, CACHE, job.endpoints["cache"], "cache-0")
        memory, flash, manifest = job.plan.memory, job.plan.flash, job.package.manifest
        slots, reserves = (memory.trigger_slots, memory.value_slots), (flash.reserved_triggers, flash.reserved_values)
        pinned = memory.pins_for(1).counts(manifest.model.ffns)
        self._regions = [
            FreeSlots(
                Region(
                    part=part,
                    slots=slots[part],
                    reserve=reserves[part],
                    clusters=manifest.clusters,
                    pinned=pinned[part],
                )
            )
            for part in PARTS
        ]
        self._entries = [self._memory.view("residency", name) for name in NAMES]
        self._pointers = [ffi.from_buffer("uint32_t[]", entries) for entries in self._entries]
        self._windows = ffi.from_buffer("uint64_t[]", self._memory.view("residency", "windows"))
        self._hands = [ffi.new("size_t *"), ffi.new("size_t *")]
        self._generation_word = ffi.from_buffer("uint32_t[]", self._memory.view("residency", "generation"))
        self._generation = 0
        self._settled = False
        self._reset_at = 0.0
        self._counts: SlotCounts | None = None
        self._hungry = False

    def serve(self) -> None:
        """Serve until drained."""
        self._service.add(self._link, self._from_loader)
        self._reset()
        self._service.serve(lambda message: None, self._before_wait)
        self._context.close()

    def _reset(self) -> None:
        """A new generation: the loader forgets its slots, and what it says of older ones no longer counts."""
        self._generation = int(lib.np_word_load(self._generation_word)) + 1
        lib.np_word_store(self._generation_word, self._generation)
        self._settled = False
        self._reset_at = time.monotonic()
        self._link.send(Reset(generation=self._generation))

    def _before_wait(self) -> int | None:
        if self._hungry and self._counts is not None:
            self._feed(self._counts)
        return RETRY_MS if self._hungry else None

    def _from_loader(self) -> None:
        while (message := self._link.receive()) is not None:
            self._take(message)

    def _take(self, message: Message) -> None:
        assert isinstance(message, ResetDone | SlotCounts)
        if message.generation == self._generation:
            if not self._settled:
                self._start()  # a SlotCounts says it as well: the ResetDone before it may have been lost
            if isinstance(message, SlotCounts):
                self._feed(message)
        elif message.generation == 0 and (self._settled or time.monotonic() - self._reset_at > LOST_AFTER_S):
            self._reset()  # another loader than the one that was reset; or the reset was lost with an earlier one

    def _start(self) -> None:
        """Every slot is either named by a present word or free. Then warm up: the pinned clusters first."""
        self._settled = True
        for region, entries in zip(self._regions, self._entries, strict=True):
            state, slot = lib.NP_ENTRY_STATE_MASK, lib.NP_ENTRY_SLOT_MASK
            region.restart(entry & slot for entry in entries if entry & state == lib.NP_ENTRY_PRESENT)
        self._feed(SlotCounts(generation=self._generation, trigger_free=0, value_free=0))
        for warm in warm_ups(self._regions[TRIGGER].region, self._regions[VALUE].region):
            self._warm(warm)
        self._service.become_available()

    def _warm(self, warm: WarmUp) -> None:
        for part, bit in ((TRIGGER, 1), (VALUE, 2)):
            if warm.parts & bit:
                self._grant(part, self._regions[part].take(len(warm)))
        for piece in packed(warm):
            self._link.send(Warm(generation=self._generation, parts=warm.parts, clusters=piece, pinned=warm.pinned))

    def _feed(self, counts: SlotCounts) -> None:
        """Bring the loader's free slots up to what the plan wants, and to what is waiting."""
        self._counts = counts
        self._hungry = False
        said = (
            (counts.trigger_free, counts.trigger_waiting, counts.trigger_granted),
            (counts.value_free, counts.value_waiting, counts.value_granted),
        )
        for part, (free, waiting, received) in enumerate(said):
            granted = self._regions[part].grant(free, waiting, received, functools.partial(self._evict, part))
            self._hungry |= self._grant(part, granted) + free == 0 and waiting > 0

    def _grant(self, part: int, slots: Iterable[int]) -> int:
        """Returns how many they were."""
        count = 0
        for piece in packed(slots):
            self._link.send(Grant(generation=self._generation, part=part, slots=piece))  # type: ignore[arg-type]
            count += len(piece) // 4
        return count

    def _evict(self, part: int, want: int) -> array[int]:
        began_ns = trace.now()
        slots: Any = ffi.new("uint32_t[]", want)
        taken = lib.np_clock_take(
            self._pointers[part],
            len(self._entries[part]),
            self._hands[part],
            self._windows,
            len(self._windows),
            want,
            slots,
        )
        self._trace.put(lib.NP_SPAN_EVICT, began_ns, value=taken)
        return array("I", bytes(ffi.buffer(slots, 4 * taken)))
