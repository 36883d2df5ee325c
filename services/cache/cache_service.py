"""The cache manager decides which clusters stay resident. It evicts ahead of need, so that the loader has free slots.

All its state is in shared memory: the residency entries say in which slot a cluster is. A cache manager that starts
resets the loader and reads the entries.

Another eviction policy is a subclass that overrides `CacheService.evict`; see CONTRIBUTING.md and
services/examples/random_eviction.py.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from array import array
from collections.abc import Iterable
from typing import Any, Final, Literal

from neuronpipe.native import ffi, lib
from neuronpipe.plans.activity.eviction_rule import EvictionRule, whole_experts_by_part
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.borrowed_memory import PartCounts
from neuronpipe.plans.plan.document import Memory, reads_whole
from neuronpipe.plans.plan.offloaded_blocks import offloaded_clusters
from neuronpipe.plans.plan.pinned_clusters import pins_within
from neuronpipe.protocol.channel import Connection, open_context
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.layouts.run import BOARD_FLASH
from neuronpipe.protocol.layouts.weights import PIN_STATE
from neuronpipe.protocol.links import CACHE
from neuronpipe.protocol.memory.residency import TRIGGER, VALUE
from neuronpipe.protocol.messages.cache import Reserve, ResetDone, SlotCounts, Trimmed
from neuronpipe.protocol.messages.loader import Grant, Reset, Trim, Warm
from neuronpipe.protocol.messages.outcome import Reserved
from neuronpipe.services.cache.residency import Counts, FreeSlots, PinTable, PinTrial, Region, WarmUp, packed, warm_ups
from neuronpipe.services.cache.slot_resizing import Resizing
from neuronpipe.services.runtime import trace
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.runtime.miss_counts import Misses
from neuronpipe.services.runtime.run_memory import RunMemory
from neuronpipe.services.runtime.service_base import Service
from neuronpipe.services.runtime.trace import Trace

RETRY_MS = 1
FOLLOW_MS = 50
GIVEN_UP_MS = 250  # how soon an unanswered `Trim` is noticed
SETTLED_AFTER_S = 1.0  # by then the loader has pinned the clusters of the last `Warm`
MAX_PINNED_AT_ONCE = 1024
LOST_AFTER_S = 1.0
NO_CLUSTER = 0xFFFFFFFF
WARM_UP_LEFT = BOARD_FLASH.index("warm_up_left_bytes")
WARM_UP_SHARE = 64  # if fewer than one in 64 slots are new, demands fill them soon enough
NAMES = ("trigger_entries", "value_entries")
PARTS: Final[tuple[Literal[0, 1], ...]] = (TRIGGER, VALUE)


PIN_NOTES: Final = {
    PinTrial.TRIAL: "the miss rate is far above the plan's: the pins are released as a trial",
    PinTrial.LET_GO: "the pins are released for good: the miss rate is lower without them",
    PinTrial.PROVED: "the pins are restored: the miss rate is no lower without them",
}
log = logging.getLogger(__name__)


class Pinning:
    """The plan's table of pinned clusters, reduced to the current number of slots of either part.

    moving: slots that must stay unpinned, unless every cluster has a slot
    """

    def __init__(self, manifest: Manifest, memory: Memory, moving: int) -> None:
        self._ffns, self._clusters, self._all = manifest.model.ffns, manifest.layout.clusters, manifest.clusters
        self._planned = [entry.counts(self._ffns) for entry in memory.pins]
        self._moving = moving
        self._widest = [
            ffi.new("uint32_t[]", [max(each) for each in zip(*(entry[part] for entry in self._planned), strict=True)])
            for part in PARTS
        ]
        self._absent = ffi.new("uint32_t[]", MAX_PINNED_AT_ONCE)

    def fit(self, slots: PartCounts, *, pin: bool = True) -> None:
        """Reduce the plan's table to these numbers of slots.

        pin: False unpins everything, unless every cluster has a slot
        """

        def within(counts: Counts, count: int) -> Counts:
            if not pin and count < self._all:
                return (0,) * self._ffns
            return pins_within(counts, count, self._moving, self._all)

        self._table = [
            tuple(within(counts, slots[part]) for part, counts in enumerate(entry)) for entry in self._planned
        ]
        self._native_table = [[ffi.new("uint32_t[]", counts) for counts in entry] for entry in self._table]

    @property
    def any_planned(self) -> bool:
        return any(any(counts) for entry in self._planned for counts in entry)

    @property
    def entries(self) -> int:
        return len(self._table)

    def counts(self, entry: int) -> tuple[Counts, ...]:
        """Return the numbers of pinned clusters of either part in this entry of the table."""
        return self._table[entry]

    def follow(self, part: int, entry: int, words: Any) -> tuple[int, bytes]:
        """Pin the resident clusters of this entry, and unpin all others.

        Return how many residency entries are not settled yet, and up to MAX_PINNED_AT_ONCE of the clusters that must be
        read for it, packed as uint32.
        """
        unsettled = ffi.new("size_t *")
        pinned, widest = self._native_table[entry][part], self._widest[part]
        absent_count = lib.np_pins_follow(
            words, self._ffns, self._clusters, pinned, widest, self._absent, MAX_PINNED_AT_ONCE, unsettled
        )
        absent = array("I", bytes(ffi.buffer(self._absent)))
        count = absent.index(NO_CLUSTER) if NO_CLUSTER in absent else len(absent)
        return int(absent_count) + int(unsettled[0]), absent[:count].tobytes()


class CacheService:
    """The process of role `cache`: messages, shared memory and eviction around the bookkeeping of residency.py."""

    def __init__(self, job: Job) -> None:
        self._memory = RunMemory.open("cache", job.segments)
        self._trace = Trace.of(job, self._memory)
        self._context = open_context()
        self._service = Service(self._context, job, slots=0, available=False)
        self._link = Connection(self._context, CACHE, job.endpoints["cache"], "cache-0")
        memory, flash, manifest = job.plan.memory, job.plan.flash, job.package.manifest
        reserves = flash.reserved_triggers, flash.reserved_values
        self._sequences = self._memory.view("board", "texts")
        self._withheld = self._memory.view("board", "withheld")
        self._resizing = Resizing(manifest, job.plan.compute, memory)
        self._resizing.reserve(None, self._memory.view("board", "reserved")[0])
        self._resizing.withhold(self._withheld[0])
        slots = self._resizing.begin()
        self._pin_table = PinTable([entry.texts for entry in memory.pins], self._sequences[0])
        self._pins = Pinning(manifest, memory, self._resizing.min_slots)
        self._misses = self._memory.view("board", "misses")
        self._slots_shown = self._memory.view("residency", "slots")
        self._pin_trial = PinTrial(job.plan.expected.miss_rate, self._slots_shown[PIN_STATE])
        self._pins.fit(slots, pin=self._pin_trial.holds)
        pinned = self._pins.counts(self._pin_table.entry)
        self._regions = [
            FreeSlots(
                Region(
                    part=part,
                    slots=slots[part],
                    reserve=reserves[part],
                    clusters=manifest.clusters,
                    pinned=pinned[part],
                    offloaded=offloaded_clusters(manifest.layout, min(job.plan.compute.held_blocks, default=0)),
                )
            )
            for part in PARTS
        ]
        self._entries = [self._memory.view("residency", name) for name in NAMES]
        self._pointers = [ffi.from_buffer("uint32_t[]", entries) for entries in self._entries]
        self._windows = ffi.from_buffer("uint64_t[]", self._memory.view("residency", "windows"))
        self._slots_shown[0], self._slots_shown[1] = slots
        self._slots_shown[PIN_STATE] = self._pin_trial.state
        are_read_whole = reads_whole(job.plan.compute, job.plan.flash)
        experts = whole_experts_by_part(manifest, job.plan.compute.mode, reads_whole=are_read_whole)
        self._rules = [EvictionRule(manifest.clusters, count, manifest.layout.clusters) for count in experts]
        self._generation_word = ffi.from_buffer("uint32_t[]", self._memory.view("residency", "generation"))
        self._generation = 0
        self._settled = False
        self._warms = True  # the warm-up is to be sent: the loader is new, or forgets it with a reset
        self._flash = self._memory.view("board", "flash")
        self._reset_at = 0.0
        self._counts: SlotCounts | None = None
        self._hungry = False
        self._exhausted = [False, False]  # for either part: the loader knows that no slot can be freed
        self._follow_next_s = 0.0
        self._follow_until_s: float | None = None  # pins are checked at least until then

    def serve(self) -> None:
        """Serve until the coordinator drains the process."""
        self._service.add(self._link, self._from_loader)
        self._reset()
        self._service.serve(self._from_coordinator, self._before_wait)
        self._context.close()

    def _reset(self) -> None:
        """Begin a new generation: the loader forgets its slots, and its messages of older generations are ignored."""
        self._generation = int(lib.np_word_load(self._generation_word)) + 1
        lib.np_word_store(self._generation_word, self._generation)
        self._settled = False
        self._exhausted = [False, False]
        self._resizing.restarted()
        self._reset_at = time.monotonic()
        self._link.send(Reset(generation=self._generation))

    def _before_wait(self) -> int | None:
        if self._hungry and self._counts is not None:
            self._feed(self._counts)
        if self._resizing.withhold(self._withheld[0]):
            self._resize()
        vacates = self._settled and self._resizing.vacates and self._vacate()
        follows = self._settled and self._follow(time.monotonic())
        if self._hungry or vacates:
            return RETRY_MS
        if follows:
            return FOLLOW_MS
        return GIVEN_UP_MS if self._resizing.vacates else None

    # ---- the number of slots ---------------------------------------------------------------------------------
    def _from_coordinator(self, message: Message) -> None:
        if isinstance(message, Reserve):
            self._resizing.reserve(message.number, message.reserved_bytes)
            self._resize()

    def _resize(self) -> None:
        """Change the number of slots to what is required now, unless a change is under way. Additional slots are used
        at once; fewer slots need a reset of the loader."""
        if self._resizing.vacates or not self._settled:
            return
        before, slots = self._resizing.slots, self._resizing.begin()
        self._pins.fit(slots, pin=self._pin_trial.holds)
        self._slots_shown[0], self._slots_shown[1] = slots
        for part, pinned in enumerate(self._pins.counts(self._pin_table.entry)):
            self._regions[part].resize(slots[part], pinned)
        if self._resizing.vacates:
            self._warms = bool(self._flash[WARM_UP_LEFT])
            self._reset()
            return
        if (number := self._resizing.answer()) is not None:
            self._service.answer(Reserved(number=number))
        if slots != before:
            self._settle_pins(self._pin_table.entry)
        if sum(slots) - sum(before) > sum(slots) // WARM_UP_SHARE:
            self._warm_all()

    def _vacate(self) -> bool:
        """Empty the slots beyond the new end, then send `Trim` to the loader. Return True if some are still in use."""
        if self._resizing.is_trim_requested(time.monotonic()):
            if not self._resizing.vacates:  # the loader does not implement `Trim`
                self._resize()
            return False
        for part, slots in enumerate(self._resizing.slots):
            words, windows = self._pointers[part], self._windows
            if lib.np_slots_vacate(words, len(self._entries[part]), slots, windows, len(windows)):
                return True
        triggers, values = self._resizing.slots
        self._link.send(Trim(generation=self._generation, trigger_slots=triggers, value_slots=values))
        self._resizing.trim_requested(time.monotonic())
        return False

    def _follow(self, now_s: float) -> bool:
        """Adapt the pins to the number of sequences. Return True if they are not settled yet."""
        if self._pin_table.update(self._sequences[0], now_s):
            self._settle_pins(self._pin_table.entry)
        if self._follow_until_s is None or now_s < self._follow_next_s:
            return self._follow_until_s is not None
        self._follow_next_s = now_s + FOLLOW_MS / 1000
        done = True
        for part, entries in zip(PARTS, self._pointers, strict=True):
            unsettled, absent = self._pins.follow(part, self._pin_table.entry, entries)
            done &= not unsettled
            waits = self._counts is None or (self._counts.trigger_waiting, self._counts.value_waiting)[part]
            if len(absent) and not waits:  # a piece at a time, so that other clusters are evicted no sooner than needed
                self._link.send(Warm(generation=self._generation, parts=1 << part, clusters=absent, pinned=True))  # type: ignore[arg-type]
                self._follow_until_s = now_s + SETTLED_AFTER_S
        if done and now_s >= self._follow_until_s:
            self._follow_until_s = None
        return self._follow_until_s is not None

    def _try_pins(self) -> None:
        """Release or restore the plan's pins, as the misses of decode steps suggest."""
        if not self._pins.any_planned or not self._settled or self._resizing.vacates:
            return
        state = self._pin_trial.state
        if self._pin_trial.look(Misses.on_board(self._misses)):
            self._pins.fit(self._resizing.slots, pin=self._pin_trial.holds)
            self._settle_pins(self._pin_table.entry)
        if self._pin_trial.state != state:
            log.warning(PIN_NOTES[self._pin_trial.state])
            self._slots_shown[PIN_STATE] = self._pin_trial.state

    def _settle_pins(self, entry: int) -> None:
        """Use this entry of the plan's table from now on, with the current slots."""
        for slots, pinned in zip(self._regions, self._pins.counts(entry), strict=True):
            slots.region = dataclasses.replace(slots.region, pinned=pinned)
        self._follow_next_s = 0.0
        self._follow_until_s = time.monotonic() + SETTLED_AFTER_S

    def _from_loader(self) -> None:
        while (message := self._link.receive()) is not None:
            self._take(message)

    def _take(self, message: Message) -> None:
        assert isinstance(message, ResetDone | SlotCounts | Trimmed)
        if message.generation == self._generation:
            if not self._settled:
                self._start()  # also at a SlotCounts: the ResetDone before it may have been lost
            if isinstance(message, SlotCounts):
                self._feed(message)
                self._try_pins()
            elif isinstance(message, Trimmed):
                self._resizing.trimmed()
                self._resize()
        elif message.generation == 0 and (self._settled or time.monotonic() - self._reset_at > LOST_AFTER_S):
            self._warms = True
            self._reset()  # the loader was replaced, or the reset was lost with an earlier loader

    def _start(self) -> None:
        """Begin after the loader's reset: find the slots that no present entry names, and send the warm-up."""
        self._settled = True
        for part, slots in enumerate(self._resizing.slots):
            free = bytearray(b"\1") * slots
            with ffi.from_buffer(free, require_writable=True) as marked:
                lib.np_slots_mark(self._pointers[part], len(self._entries[part]), marked, slots)
            self._regions[part].restart(free)
        self._feed(SlotCounts(generation=self._generation, trigger_free=0, value_free=0))
        if self._warms:
            self._warm_all()
        if (
            self._pins.entries > 1 or self._generation > 1
        ):  # clusters may be pinned for another entry, or for more slots
            self._settle_pins(self._pin_table.entry)
        self._service.become_available()
        self._resize()  # requests that arrived meanwhile

    def _warm_all(self) -> None:
        for warm in warm_ups(self._regions[TRIGGER].region, self._regions[VALUE].region):
            self._warm(warm)

    def _warm(self, warm: WarmUp) -> None:
        for part, bit in ((TRIGGER, 1), (VALUE, 2)):
            if warm.parts & bit:
                self._grant(part, self._regions[part].take(len(warm)))
        for piece in packed(warm):
            self._link.send(Warm(generation=self._generation, parts=warm.parts, clusters=piece, pinned=warm.pinned))

    def _feed(self, counts: SlotCounts) -> None:
        """Grant the loader free slots, up to the plan's reserve and one for each waiting cluster."""
        self._counts = counts
        self._hungry = False
        counts_by_part = (
            (counts.trigger_free, counts.trigger_waiting, counts.trigger_granted),
            (counts.value_free, counts.value_waiting, counts.value_granted),
        )
        for part, (free, waiting, received) in enumerate(counts_by_part):
            granted = self._regions[part].grant(free, waiting, received, functools.partial(self._traced_evict, part))
            if self._grant(part, granted) + free == 0 and waiting > 0:
                self._hungry = True
                self._report_exhausted(part, received)

    def _report_exhausted(self, part: int, received: int) -> None:
        """Tell the loader, once until its next grant, that all unpinned slots of this part are in use, so that it reads
        the other part without waiting for one."""
        if not self._exhausted[part] and not self._regions[part].on_the_way(received):
            self._exhausted[part] = True
            self._link.send(Grant(generation=self._generation, part=part, slots=b""))  # type: ignore[arg-type]

    def _grant(self, part: int, slots: Iterable[int]) -> int:
        count = 0
        for piece in packed(slots):
            self._link.send(Grant(generation=self._generation, part=part, slots=piece))  # type: ignore[arg-type]
            count += len(piece) // 4
        if count:
            self._exhausted[part] = False
        return count

    # ---- eviction --------------------------------------------------------------------------------------------
    def _traced_evict(self, part: int, count: int) -> array[int]:
        start_ns = trace.now()
        slots = self.evict(part, count)
        self._trace.put(lib.NP_SPAN_EVICT, start_ns, value=len(slots))
        return slots

    def evict(self, part: int, count: int) -> array[int]:
        """Evict up to `count` clusters of a part (0 triggers, 1 values) and return the slots that this freed.

        The default policy is CLOCK with usage counts, or LFU with ageing for whole experts
        (plans/activity/eviction_rule.py). A subclass may override the method and choose freely, since results never
        depend on what is resident. It must return only slots that `evict` of this class or `evict_clusters` has
        returned, each once, and must not wait. If it returns fewer slots than are needed, it is called again within
        milliseconds.
        """
        return self._rules[part].take(self._pointers[part], count, self._windows, len(self._windows))

    def evict_clusters(self, part: int, clusters: array[int], count: int) -> array[int]:
        """Evict the first `count` of these clusters that are resident, unpinned and not being read, and return the
        slots that this freed.

        clusters: uint32 ids in the package's order; those out of range are ignored
        """
        slots: Any = ffi.new("uint32_t[]", count)
        ids = ffi.from_buffer("uint32_t[]", clusters)
        entries, words = self._entries[part], self._pointers[part]
        evicted = lib.np_clusters_evict(
            words, len(entries), ids, len(clusters), self._windows, len(self._windows), count, slots
        )
        return array("I", bytes(ffi.buffer(slots, 4 * evicted)))

    def entries(self, part: int) -> memoryview:
        """Return the residency entries of a part, a uint32 per cluster; protocol/memory/residency.py explains their
        bits. They change at any time: read them, and write them only through `evict_clusters`."""
        return self._entries[part].toreadonly()
