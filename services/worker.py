"""What decode and prefill workers share: their view of shared memory, and the way to ask the loader for clusters."""

from __future__ import annotations

from array import array
from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.protocol.messages.outcome import Prefilled, StepAbandoned, StepDone, StepFailed
from neuronpipe.protocol.messages.worker import Prefill, Step
from neuronpipe.services.job import Job
from neuronpipe.services.member import Abandoned, Damaged, Member, Place, View
from neuronpipe.services.memory import RunMemory
from neuronpipe.services.parts import GATE, PREFETCH
from neuronpipe.services.rings import Rings

ROOM_MS = 1000  # of waiting for room in the ring, before looking again


class Worker:
    """A member of steps with its ring of requests. private: the residual stream and partial sums are this
    process's own; otherwise they lie in the exchange segment, where the other members see them."""

    def __init__(self, job: Job, memory: RunMemory, place: Place, window: int, *, private: bool) -> None:
        self._rings = Rings(memory, job.doorbell)
        self._ring = self._rings.of(window)
        self._epoch = 0
        self._loaded = ffi.from_buffer("uint32_t[]", memory.view("residency", "loaded"))
        self._epoch_word = ffi.from_buffer("uint32_t[]", memory.view("exchange", "epoch"))
        self._job, self._memory, self._place, self._window, self._private = job, memory, place, window, private
        self._member: Member | None = None

    def wait_until_loaded(self) -> None:
        """Sleep until the loader has verified and sealed the fixed tensors; the engine is built then."""
        while lib.np_word_load(self._loaded) == 0:
            lib.np_word_wait(self._loaded, 0, self._epoch_word, lib.np_word_load(self._epoch_word), 0, 1000)
        self._member = Member(self._job.package.manifest, self._view(), self._place, self._fetch)

    def answer(
        self,
        ask: Step | Prefill,
        done: type[StepDone] | type[Prefilled],
        sequences: tuple[int, ...],
        positions: tuple[int, ...],
        logits: tuple[int, int] | None,
    ) -> StepDone | Prefilled | StepAbandoned | StepFailed:
        """Compute the step and say how it went. logits: see Member.compute."""
        step, epoch, index = ask.step, ask.epoch, self._job.seat.index
        assert self._member is not None
        self._epoch = epoch
        try:
            self._member.compute(epoch, sequences, positions, ask.tokens, logits)
        except Abandoned:
            return StepAbandoned(step=step, epoch=epoch, index=index)
        except Damaged as error:
            return StepFailed(step=step, epoch=epoch, index=index, code="damaged", message=str(error))
        return done(step=step, epoch=epoch, index=index, counters=self._member.counters())

    def _fetch(self, part: int, clusters: bytes, priority: int) -> None:
        """Ask the loader. A prefetch that finds the ring full is let go; a demand waits for room, until the epoch
        changes (Abandoned)."""
        bits = lib.NP_REQUEST_GATE if part == GATE else lib.NP_REQUEST_REST
        bits |= lib.NP_REQUEST_PREFETCH if priority == PREFETCH else 0
        entries = array("I", [cluster | bits for cluster in array("I", clusters)])
        while entries:
            head = self._ring.head[0]
            del entries[: lib.np_requests_put(self._ring, ffi.from_buffer("uint32_t[]", entries), len(entries))]
            if not entries or priority == PREFETCH:
                return
            waited = lib.np_word_wait(self._ring.head, head, self._epoch_word, self._epoch, 0, ROOM_MS)
            if waited == lib.NP_E_EPOCH:
                raise Abandoned

    def _view(self) -> View:
        memory, manifest = self._memory, self._job.package.manifest
        fixed = memory.view("fixed", "file")
        shape, blocks, most = manifest.shape, manifest.layout.blocks, self._place.most_tokens

        def stage(field: str, floats_per_token: int) -> Any:
            return array("f", bytes(4 * most * floats_per_token)) if self._private else memory.view("exchange", field)

        windows = memory.view("residency", "windows")
        members = len(windows) // 2
        return View(
            fixed={name: fixed[entry.start : entry.stop] for name, entry in self._job.package.fixed.items()},
            residual=stage("residual", shape.width),
            queries=stage("queries", shape.query_width),
            attention=stage("attention", shape.query_width),
            partials=stage("partials", blocks * shape.width),
            logits=memory.view("exchange", "logits"),
            kv=memory.view("kv", "kv"),
            gate_slots=memory.view("slots", "gate_slots"),
            rest_slots=memory.view("slots", "rest_slots"),
            gate_words=memory.view("residency", "gate_words"),
            rest_words=memory.view("residency", "rest_words"),
            gate_window=windows[self._window : self._window + 1],
            rest_window=windows[members + self._window : members + self._window + 1],
            arrivals=memory.view("residency", "arrivals"),
            epoch=memory.view("exchange", "epoch"),
            barrier=memory.view("exchange", "barriers"),
        )
