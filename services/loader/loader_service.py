"""The loader, the only process that reads neurons from flash: one queue, direct I/O, deep submission. It also saves and
restores prefixes (prompt_cache.py).

Workers put requests for absent clusters into rings in shared memory, and the cache manager grants free slots. The
native loader empties the rings, claims the residency entries, reads into the slots, verifies checksums, publishes the
entries and wakes the waiting workers, all in one call that lasts until a message comes. Python only handles messages.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.native.huge_mapping import HugeMapping, collapse
from neuronpipe.plans.package.manifest import FIXED, PREDICTOR
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Flash
from neuronpipe.plans.plan.memory_budget import queue_clusters
from neuronpipe.protocol.channel import Listener, open_context
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.errors import Full, Lost, UserError
from neuronpipe.protocol.links import CACHE
from neuronpipe.protocol.memory.residency import TRIGGER, VALUE
from neuronpipe.protocol.memory.segments import Closing, Segment
from neuronpipe.protocol.messages.cache import ResetDone, SlotCounts, Trimmed
from neuronpipe.protocol.messages.loader import Grant, Reset, Trim, Warm
from neuronpipe.services.loader.native_source import NativeSource
from neuronpipe.services.loader.prompt_cache import PromptCache
from neuronpipe.services.runtime.core_pinning import unpinned
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.runtime.run_memory import Rings, RunMemory
from neuronpipe.services.runtime.service_base import Service
from neuronpipe.services.runtime.trace import Trace

UNKNOWN_GENERATION_MS = 50
SPIN_US = 0  # cores are for the workers; an interrupt reports a read
log = logging.getLogger(__name__)


def load_fixed(package: Package, segment: Segment) -> None:
    """Copy fixed.safetensors, and predictor.safetensors if it is used, into the segment and seal it.

    If the embedding stays on flash, checksums of its rows are stored instead of it. Do nothing if an earlier loader has
    sealed the segment. Verifies the tokenizer, the checksum table and the tensors; raises UserError, which names the
    file.
    """
    if segment.sealed:
        return
    with segment.map(writable=True, mapper=HugeMapping) as mapping:
        targets = {FIXED: mapping.view("file"), PREDICTOR: mapping.view("predictor")}
        loaded = {name: target for name, target in targets.items() if len(target)}
        package.verify_fixed(loaded=loaded.keys())
        checksums = mapping.view("embedding_checksums")
        embedding = package.embedding_quants if len(checksums) else None
        for name, target in loaded.items():
            if name == FIXED and embedding is not None:
                with _RowChecksums(embedding.row_bytes, checksums) as rows:
                    package.load(name, target, skipped=embedding, pass_rows=rows, prepare=collapse)
            else:
                package.load(name, target, prepare=collapse)
        for target in (*targets.values(), checksums):
            target.release()
    segment.seal()


class _RowChecksums(Closing):
    """Stores the CRC-32C of each row that is passed to it, one after the other."""

    def __init__(self, row_bytes: int, checksums: memoryview) -> None:
        self._row_bytes, self._checksums = row_bytes, checksums

    def __call__(self, rows: memoryview) -> None:
        count = len(rows) // self._row_bytes
        with self._checksums[:count] as checksums:
            target = ffi.from_buffer("uint32_t[]", checksums, require_writable=True)
            lib.np_row_checksums(ffi.from_buffer(rows), self._row_bytes, count, target)
            ffi.release(target)
        following = self._checksums[count:]
        self._checksums.release()
        self._checksums = following

    def close(self) -> None:
        """Release the memory that follows the last checksum."""
        self._checksums.release()


def _open_reader(package: Package, flash: Flash, flight_reads: int) -> Any:
    """Return an np_reader of the files with neurons. Raises UserError if one cannot be opened.

    flight_reads: result of np_loader_flight_reads
    """
    first, *further = map(str, package.neuron_files)
    depth = flash.depth * flight_reads + flash.warm_up_reads
    error = ffi.new("int *")
    reader = lib.np_reader_open(os.fsencode(first), flash.engine.encode(), depth, error)
    if reader == ffi.NULL and flash.engine != "threads":
        log.warning("this system refuses %s (errno %d); reading with threads", flash.engine, error[0])
        reader = lib.np_reader_open(os.fsencode(first), b"threads", depth, error)
    if reader == ffi.NULL:
        raise UserError(f"{first}: cannot be opened for reading (errno {error[0]})")
    for path in further:
        if (number := lib.np_reader_add(reader, os.fsencode(path))) < 0:
            raise UserError(f"{path}: cannot be opened for reading (errno {-number})")
    return reader


class Core:
    """The native loader, with this process's mappings of shared memory."""

    def __init__(self, job: Job, memory: RunMemory) -> None:
        manifest, flash = job.package.manifest, job.plan.flash
        source = None if manifest.source_experts is None else NativeSource(job.package, manifest.source_experts)
        # Two for each cluster: one of each part.
        checksums = ffi.from_buffer("uint32_t[]", job.package.checksums() if source is None else source.checksums)
        self._keep: list[Any] = [checksums, source]
        layout, memory_plan = manifest.layout, job.plan.memory
        places = manifest.slots(moved=memory_plan.are_scales_moved)
        described = (
            (
                "trigger",
                0,
                layout.trigger_part_bytes,
                places.trigger_bytes,
                memory_plan.trigger_slots,
                memory_plan.lent_trigger_slots,
                flash.reserved_triggers,
            ),
            (
                "value",
                layout.trigger_part_bytes,
                layout.value_part_bytes,
                places.value_bytes,
                memory_plan.value_slots,
                memory_plan.lent_value_slots,
                flash.reserved_values,
            ),
        )
        parts = ffi.new(
            "np_loader_part[2]",
            [
                {
                    "base_offset": 0,
                    "stride_bytes": layout.cluster_stride_bytes if source is None else 0,
                    "part_offset": part_offset,
                    "part_bytes": part_bytes,
                    "slot_bytes": slot_bytes,
                    "moved_from": places.moved_from if part == VALUE else 0,
                    "moved_bytes": places.moved_bytes if part == VALUE else 0,
                    "slot_count": own_slots + lent_slots,
                    "demand_slots": reserve // 4 if own_slots < manifest.clusters else 0,
                    "slots": ffi.cast("uint8_t *", ffi.from_buffer(memory.view("slots", f"{name}_slots"))),
                    "slots_file": memory.segments["slots"].fd,
                    "slots_file_offset": memory.segments["slots"].layout[f"{name}_slots"].offset_bytes,
                    "words": ffi.cast("uint32_t *", ffi.from_buffer(memory.view("residency", f"{name}_entries"))),
                    "cluster_count": manifest.clusters,
                    "checksums": checksums + part,
                    "checksum_stride": 2,
                }
                for part, (
                    name,
                    part_offset,
                    part_bytes,
                    slot_bytes,
                    own_slots,
                    lent_slots,
                    reserve,
                ) in enumerate(described)
            ],
        )
        reading = ffi.new(
            "np_loader_reading *",
            {
                "most_read_bytes": flash.most_read_bytes,
                "merge_gap_bytes": flash.merge_gap_bytes,
                "prefetch_depth": flash.prefetch_depth,
                "warm_up_reads": flash.warm_up_reads,
                "warm_up_read_bytes": flash.warm_up_read_bytes,
                "source": ffi.NULL if source is None else source.native,
            },
        )
        arrivals = ffi.cast("uint32_t *", ffi.from_buffer(memory.view("residency", "arrivals")))
        self._keep += [parts, memory]
        self._reader = _open_reader(job.package, flash, lib.np_loader_flight_reads(reading, parts))
        self._loader = lib.np_loader_create(self._reader, parts, reading, arrivals, queue_clusters(manifest))
        if self._loader == ffi.NULL:
            raise UserError(
                f"{job.package.neurons_path}: the layout does not suit direct reads here, or memory is short"
            )
        self._attach(memory, job.doorbell, Trace.of(job, memory))
        self._state = ffi.new("np_loader_state *")

    def _attach(self, memory: RunMemory, doorbell: Path, trace: Trace) -> None:
        rings = Rings(memory, doorbell)
        board = ffi.from_buffer("uint64_t[]", memory.view("board", "flash"))
        participants = ffi.new("np_requests[]", [rings.of(participant)[0] for participant in range(rings.participants)])
        epoch = ffi.from_buffer("uint32_t[]", memory.view("exchange", "epoch"))
        in_flight = ffi.from_buffer("uint32_t[]", memory.view("residency", "in_flight"))
        self._keep += [rings, board, epoch, in_flight, trace]
        attached = lib.np_loader_attach(
            self._loader, participants, rings.participants, board, epoch, in_flight, trace.native
        )
        if attached < 0:
            raise MemoryError("the loader's list of rings could not be allocated")

    def warm_up(self, parts: int, clusters: bytes, *, pinned: bool) -> None:
        """Load clusters that are not resident while nothing else waits. Logs an error if an id is out of range.

        parts, clusters, pinned: the fields of `Warm`
        """
        ids = ffi.from_buffer("uint32_t[]", clusters)
        flags = lib.NP_ENTRY_PINNED if pinned else 0
        if lib.np_loader_warm_up(self._loader, parts * lib.NP_REQUEST_TRIGGER, ids, len(ids), flags) < 0:
            log.error("a message named clusters outside the package; dropped")

    def grant(self, part: int, slots: bytes) -> None:
        """Add free slots, packed as uint32. Raises RuntimeError if a slot does not exist or is in use."""
        if lib.np_loader_grant(self._loader, part, ffi.from_buffer("uint32_t[]", slots), len(slots) // 4) < 0:
            raise RuntimeError("the cache granted a slot that does not exist or is in use")

    def trim(self, slots: tuple[int, int]) -> None:
        """Free the memory of the slots that do not stay. Raises RuntimeError if one of them is granted.

        slots: the number of slots of either part that stay
        """
        for part, first in enumerate(slots):
            result = lib.np_loader_trim(self._loader, part, first)
            if result == lib.NP_E_ARGUMENT:
                raise RuntimeError("the cache asked for the memory of a slot that it has granted")
            if result < 0:
                log.warning(
                    "the system cannot free the memory of unused slots: the run takes more than its limit allows"
                )

    def serve(self, descriptors: tuple[int, ...], timeout_ms: int) -> None:
        """Read, publish and sleep until a descriptor is readable, the number of free slots must be reported, or the
        time has passed."""
        if lib.np_loader_serve(self._loader, descriptors, len(descriptors), timeout_ms, SPIN_US) < 0:
            raise RuntimeError("the loader cannot wait for its descriptors")

    def state(self) -> Any:
        """Return an np_loader_state: free slots, waiting clusters and counters."""
        lib.np_loader_read_state(self._loader, self._state)
        return self._state

    def reset(self) -> None:
        """Forget all slots and all queued reads but demands. Reads in flight are completed."""
        lib.np_loader_reset(self._loader)


class LoaderService:
    """The process of role `loader`: the messages around the native loader."""

    def __init__(self, job: Job) -> None:
        self._memory = RunMemory.open("loader", job.segments)
        self._context = open_context()
        self._prompts = PromptCache.of(job, self._memory)
        self._service = Service(self._context, job, slots=0, available=False, prompt_cache=self._prompts is not None)
        self._cache = Listener(self._context, CACHE, job.endpoints["cache"])
        with unpinned():  # it reads and hashes in parallel
            load_fixed(job.package, self._memory.segments["fixed"])
        self._core = Core(job, self._memory)
        loaded = ffi.from_buffer("uint32_t[]", self._memory.view("residency", "loaded"))
        lib.np_word_store(loaded, 1)
        lib.np_word_wake(loaded)
        self._generation = 0
        self._granted = [0, 0]
        self._reported: SlotCounts | None = None

    def serve(self) -> None:
        """Serve until the coordinator drains the process."""
        self._service.counters = self._counters
        self._service.add(self._cache, self._from_cache)
        if (prompts := self._prompts) is None:
            self._service.serve(lambda message: None, self._report_slot_counts, self._core.serve)
        else:
            self._service.add(prompts.wake, lambda: self._send_answers(prompts))
            self._service.coordinator_lost = prompts.interrupt
            self._service.serve(prompts.submit, self._report_slot_counts, self._core.serve, prompts.close)
        self._context.close()

    def _send_answers(self, prompts: PromptCache) -> None:
        for answer in prompts.answers():
            self._service.answer(answer)

    def _counters(self) -> dict[str, float]:
        """Return the state of the queue, for heartbeats."""
        state = self._core.state()
        return {
            "in_flight": state.in_flight,
            "trigger_waiting": state.waiting[TRIGGER],
            "value_waiting": state.waiting[VALUE],
            "trigger_free": state.free_slots[TRIGGER],
            "value_free": state.free_slots[VALUE],
        }

    def _report_slot_counts(self) -> int | None:
        """Send the counts of slots to the cache manager if they have changed. Return the longest wait in milliseconds;
        None: no limit. Until the first `Reset` they are sent before each wait."""
        state = self._core.state()
        counts = SlotCounts(
            generation=self._generation,
            trigger_free=state.free_slots[TRIGGER],
            value_free=state.free_slots[VALUE],
            trigger_waiting=state.waiting[TRIGGER],
            value_waiting=state.waiting[VALUE],
            trigger_granted=self._granted[TRIGGER],
            value_granted=self._granted[VALUE],
        )
        if counts != self._reported or self._generation == 0:
            self._reported = counts
            self._send(counts)
        return UNKNOWN_GENERATION_MS if self._generation == 0 else None

    def _from_cache(self) -> None:
        while (received := self._cache.receive()) is not None:
            _, message = received
            if isinstance(message, Reset):
                if message.generation <= self._generation:
                    continue  # a late message: slots of this generation were granted already
                self._core.reset()
                self._generation, self._reported, self._granted = message.generation, None, [0, 0]
                self._send(ResetDone(generation=message.generation))
                self._service.become_available()
            elif message.generation == self._generation:  # type: ignore[attr-defined]
                self._take(message)

    def _take(self, message: Message) -> None:
        if isinstance(message, Grant):
            self._core.grant(message.part, message.slots)
            self._granted[message.part] += len(message.slots) // 4
        elif isinstance(message, Warm):
            self._core.warm_up(message.parts, message.clusters, pinned=message.pinned)
        elif isinstance(message, Trim):
            self._core.trim((message.trigger_slots, message.value_slots))
            self._send(Trimmed(generation=message.generation))

    def _send(self, message: Message) -> None:
        try:
            self._cache.send("cache-0", message)
        except (Lost, Full):
            self._reported = None  # the cache manager is not connected; the counts are sent again later
