"""The prompt cache: saves KV slots to files in the background, and restores them.

    main thread                      threads
    submit(Save)    -> queue ->      saver, at low priority: checksum, write, rename, a chunk at a time
    submit(Restore) -> queue ->      restorer: read into the slot, verify, a chunk at a time
    answers()       <- queue, wake   Saved, Restored

A coordinator that starts knows nothing of saves and restores, and will use every slot. So `interrupt` returns only when
no thread touches a slot any more, and the loader greets a coordinator only then. A file is complete or absent whenever
this process is killed, and a slot that is partly restored counts as not restored.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from neuronpipe.native import engine_id
from neuronpipe.plans.measure.probe import cache_folder
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.messages.loader import Hasten, Restore, Save
from neuronpipe.protocol.messages.outcome import Restored, Saved
from neuronpipe.services.loader.prefix_chunk import (
    CHUNK_TOKENS,
    PAGE_BYTES,
    BadChunk,
    Description,
    Origin,
    checksum,
    read_chunk,
    state_key,
    write_chunk,
)
from neuronpipe.services.loader.prefix_folder import KEPT_SHARE, PrefixFolder
from neuronpipe.services.loader.slot_regions import SlotRegions, StateSlots
from neuronpipe.services.runtime.core_pinning import unpinned
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.runtime.run_memory import RunMemory

FOLDER = "prompts"
SAVER_NICENESS = 10
HASTENED_S = 1.0  # how much longer a save may take that a request waits for
DRAIN_S = 1.0  # the same at the end of the run, which the supervisor awaits
READ_AHEAD_CHUNKS = 4
log = logging.getLogger(__name__)


class PromptCache:
    """The saves and restores of a run.

    folder: the files
    regions: the regions of a KV slot
    content: the segment of all KV slots, writable
    origin: returns the origin of keys and values that were computed in some numerics
    states: the slots of states; None: no layer has one
    """

    def __init__(
        self,
        folder: PrefixFolder,
        regions: SlotRegions,
        content: memoryview,
        origin: Callable[[str], Origin],
        states: StateSlots | None = None,
    ) -> None:
        self._folder, self._regions, self._content, self._origin = folder, regions, content, origin
        self._states = states
        self._chunk_bytes = regions.total_bytes(CHUNK_TOKENS)
        self._answers = SimpleQueue[Message]()
        self.wake, self._wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._attempt = 0  # grows when everything under way is void
        self._hastened: tuple[int, float] = 0, 0.0  # the last save concerned, and when to stop it
        self._saver = _Worker("saver", self._process, SAVER_NICENESS)
        self._restorer = _Worker("restorer", self._process, 0)

    @classmethod
    def of(cls, job: Job, memory: RunMemory) -> PromptCache | None:
        """Return the prompt cache of a run; None if the plan has none, no context has a whole chunk, or the folder
        cannot be used."""
        cache, budget_bytes = cache_folder(), job.plan.flash.prompt_cache_bytes
        if cache is None or not budget_bytes or job.plan.compute.context_tokens < CHUNK_TOKENS:
            return None
        folder = PrefixFolder(cache / FOLDER, budget_bytes)
        if not folder.prepare():
            return None
        mapping = memory.mappings["kv"]
        model = job.package.manifest.model
        regions, engine = SlotRegions.of(mapping.layout, model.cached_vectors, job.plan.compute.kv_type), engine_id()

        def origin(numerics: str) -> Origin:
            return Origin(
                package=job.package.manifest.id,
                numerics=full_numerics(numerics, job.plan.compute.mode, job.plan.id),
                engine=engine,
                regions=regions.signature,
            )

        return cls(folder, regions, mapping.content, origin, StateSlots.of(mapping.layout))

    # ---- the main thread -------------------------------------------------------------------------------------
    def submit(self, message: Message) -> None:
        """Begin what a message of the coordinator demands."""
        match message:
            case Save():
                self._saver.put(message, self._attempt)
            case Restore():
                self._restorer.put(message, self._attempt)
            case Hasten(number=number):
                self._hastened = number, time.monotonic() + HASTENED_S

    def answers(self) -> list[Message]:
        """Return the answers since the previous call. `wake` is readable when there are some."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake, 4096)
        answers: list[Message] = []
        while True:
            try:
                answers.append(self._answers.get_nowait())
            except Empty:
                return answers

    def interrupt(self) -> None:
        """Drop all saves and restores, and return when no thread touches a KV slot. No answer follows."""
        self._attempt += 1
        self._hastened = 0, 0.0  # the next coordinator begins again with number 1
        for worker in (self._saver, self._restorer):
            worker.wait_for_chunk()
        self.answers()

    def close(self) -> None:
        """End the saves within DRAIN_S, and drop the restores."""
        self._hastened = 1 << 62, time.monotonic() + DRAIN_S
        self._saver.close()
        self.interrupt()
        self._restorer.close()

    # ---- the threads -----------------------------------------------------------------------------------------
    def _answer(self, message: Message, attempt: int, lock: threading.Lock) -> None:
        with lock:  # so that no answer comes after `interrupt`
            if attempt == self._attempt:
                self._answers.put(message)
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake_end, b"\0")

    def _may_go_on(self, message: Save | Restore, attempt: int) -> bool:
        number, until = self._hastened
        is_late = isinstance(message, Save) and message.number <= number and time.monotonic() > until
        return attempt == self._attempt and not is_late

    def _process(self, message: Save | Restore, attempt: int, lock: threading.Lock) -> None:
        answer: Message = Saved(number=message.number)
        try:
            if isinstance(message, Save):
                self._save(message, attempt, lock)
            else:
                answer = Restored(number=message.number, tokens=self._restore(message, attempt, lock))
        except Exception:  # nobody may wait for ever
            log.exception("the prompt cache has failed")
            if isinstance(message, Restore):
                answer = Restored(number=message.number)
        self._answer(answer, attempt, lock)

    def _save(self, message: Save, attempt: int, lock: threading.Lock) -> None:
        """Write the chunks of a slot that have no file yet, as many as fit into the budget at once."""
        tokens, origin = _unpacked(message.tokens), self._origin(message.numerics)
        max_chunks = int(KEPT_SHARE * self._folder.budget_bytes) // (self._chunk_bytes + 2 * PAGE_BYTES)
        keys = list(origin.keys(tokens))[:max_chunks]
        stored_keys = [key for key in keys if self._folder.has(key)]
        self._folder.used(stored_keys)
        if len(stored_keys) < len(keys):
            self._folder.count()
        for number, key in enumerate(keys):
            if key in stored_keys:
                continue
            with lock:
                is_saved = self._may_go_on(message, attempt) and self._save_chunk(message, key, number, tokens, origin)
            if not is_saved:
                break
        self._folder.used(keys)
        self._save_states(message, attempt, lock, keys, origin)

    def _save_states(
        self, message: Save, attempt: int, lock: threading.Lock, keys: Sequence[str], origin: Origin
    ) -> None:
        """Write the states after whole chunks that are stored and whose state has no file yet."""
        for slot, tokens in zip(message.state_slots, message.state_tokens, strict=True):
            number, remainder = divmod(tokens, CHUNK_TOKENS)
            if (
                remainder
                or not 0 < number <= len(keys)
                or self._states is None
                or not self._folder.has(keys[number - 1])
            ):
                continue
            key, pieces = state_key(keys[number - 1]), [self._states.piece(self._content, slot)]
            with lock:
                if not self._may_go_on(message, attempt):
                    return
                if not self._folder.has(key):
                    self._add(key, tokens, (), pieces, origin)
            self._folder.used([key])

    def _save_chunk(self, message: Save, key: str, number: int, tokens: Sequence[int], origin: Origin) -> bool:
        first = number * CHUNK_TOKENS
        chunk = tuple(tokens[first : first + CHUNK_TOKENS])
        return self._add(key, first, chunk, self._pieces(message.sequence, first), origin)

    def _add(self, key: str, first: int, tokens: tuple[int, ...], pieces: Sequence[memoryview], origin: Origin) -> bool:
        """Write a file of a chunk, or of the state before position `first`, which has no tokens."""
        content_bytes = sum(map(len, pieces))
        description = Description(
            key=key,
            package=origin.package,
            numerics=origin.numerics,
            engine=origin.engine,
            regions=origin.regions,
            first=first,
            tokens=tokens,
            content_bytes=content_bytes,
            crc32c=checksum(pieces),
        )
        size_bytes = len(description.to_bytes()) + content_bytes
        return self._folder.add(key, size_bytes, lambda fd: write_chunk(fd, description, pieces))

    def _restore(self, message: Restore, attempt: int, lock: threading.Lock) -> int:
        """Read the stored chunks of a prefix that the slot lacks, as far as they are whole and right. Return how many
        tokens the slot stores then; 0 if nothing was read."""
        tokens = _unpacked(message.tokens)
        keys = list(self._origin(message.numerics).keys(tokens))
        first = end = message.first // CHUNK_TOKENS
        while end < len(keys) and self._folder.has(keys[end]):
            end += 1
        if message.state_to is not None:
            while end > first and not self._folder.has(state_key(keys[end - 1])):
                end -= 1
        restored = first
        if end * CHUNK_TOKENS >= message.min_tokens:
            while restored < end:
                for key in keys[restored + 1 : min(end, restored + 1 + READ_AHEAD_CHUNKS)]:
                    self._read_ahead(key)
                with lock:
                    if not self._may_go_on(message, attempt) or not self._restore_chunk(
                        message, keys[restored], restored, tokens
                    ):
                        break
                restored += 1
            self._folder.used(keys[:restored])
        if message.state_to is not None and restored > first and not self._restore_state(message, keys, restored, end):
            return 0
        return restored * CHUNK_TOKENS if restored > first else 0

    def _restore_state(self, message: Restore, keys: Sequence[str], restored: int, end: int) -> bool:
        """Read the state after the last chunk. Return False if a chunk or the state was not restored."""
        if restored < end or self._states is None or message.state_to is None:
            return False
        key = state_key(keys[end - 1])
        self._folder.used([key])
        return self._read(key, (), [self._states.piece(self._content, message.state_to)])

    def _restore_chunk(self, message: Restore, key: str, number: int, tokens: Sequence[int]) -> bool:
        first = number * CHUNK_TOKENS
        present = self._regions.ranges(message.sequence, first, max(first, message.first))
        pieces = self._pieces(message.sequence, first)
        return self._read(key, tokens[first : first + CHUNK_TOKENS], pieces, [size for _, size in present])

    def _read(
        self, key: str, tokens: Sequence[int], pieces: Sequence[memoryview], present_bytes: Sequence[int] = ()
    ) -> bool:
        """Read a file into the pieces, whose first bytes may be present. Return False if it is not whole and right."""
        with self._folder.opened(key) as fd:
            if fd is None:
                return False
            try:
                read_chunk(fd, key, tokens, pieces, present_bytes)
            except BadChunk as reason:
                self._folder.discard(key, str(reason))
                return False
            except OSError as error:
                log.warning("the prompt cache cannot read %s: %s", key, error.strerror)
                return False
            _advise(fd, "POSIX_FADV_DONTNEED")
        return True

    def _read_ahead(self, key: str) -> None:
        with self._folder.opened(key) as fd:
            if fd is not None:
                _advise(fd, "POSIX_FADV_WILLNEED")

    def _pieces(self, slot: int, first: int) -> list[memoryview]:
        ranges = self._regions.ranges(slot, first, first + CHUNK_TOKENS)
        return [self._content[offset : offset + size] for offset, size in ranges]


class _Worker:
    """A thread with a queue of messages. It runs from the start, so that the loader's open things do not grow with use.

    work: processes a message of an attempt; it takes the lock for each chunk
    """

    def __init__(self, name: str, work: Callable[[Save | Restore, int, threading.Lock], None], niceness: int) -> None:
        self._work, self._niceness = work, niceness
        self._queue = SimpleQueue[tuple[Save | Restore, int] | None]()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        with unpinned():  # the loader's core is for reads of weights
            self._thread.start()

    def put(self, message: Save | Restore, attempt: int) -> None:
        """Append a message to the queue."""
        self._queue.put((message, attempt))

    def wait_for_chunk(self) -> None:
        """Wait until the chunk under way is done."""
        with self._lock:
            pass

    def close(self) -> None:
        """Wait until the queue is empty, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        if self._niceness:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        while (job := self._queue.get()) is not None:
            self._work(*job, self._lock)


def full_numerics(numerics: str, mode: str, plan_id: str) -> str:
    """Return the numerics with what else of a plan the bits depend on: the mode; and anything, if a device computes."""
    return f"{numerics} {mode}" if numerics.startswith("cpu:") else f"{numerics} {mode} plan {plan_id}"


def _unpacked(tokens: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(tokens) // 4}I", tokens)


def _advise(fd: int, advice: str) -> None:
    if hasattr(os, "posix_fadvise"):  # Android's Python may lack it
        os.posix_fadvise(fd, 0, 0, getattr(os, advice))
