"""The backend `cpu`: the native engine, with a participant for each thread of the process.

A decode worker is one participant; it shares the exchange segment with the other decode workers. A prefill worker
computes its steps alone, with several threads over private stages.

The option names the instruction set (`cpu:avx2`); the default is the best of this processor. Dot products of two
instruction sets differ in their last bits, so the instruction set is part of the numerics.
"""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from statistics import fmean

from neuronpipe.native import ROW_TYPES, ffi, lib
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import DEFAULT_BACKEND
from neuronpipe.plans.plan.segment_sizes import RunShape, prefill_layouts
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.memory.layout import Layout
from neuronpipe.services.runtime.core_pinning import pin
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.runtime.run_memory import Rings, native_reuse
from neuronpipe.services.runtime.trace import Trace
from neuronpipe.services.steps.backend import Abandoned, Phase, Placement, Share, StepWork
from neuronpipe.services.worker.external_products import Multiply
from neuronpipe.services.worker.participant import EmbeddingRows, EngineConfig, Participant, View
from neuronpipe.services.worker.step_channel import Lane

Stage = Callable[[str], memoryview]
"""A function that returns the buffer of one stage of a step, by its name in the layout of the exchange segment."""


class CpuBackend:
    """The native engine as a `Backend` (services/steps/backend.py).

    multiply: computes the matrix products of layers in place of the engine, in a prefill worker; see Participant
    """

    multiply: Multiply | None = None
    rates = True
    drafts = True

    def __init__(self, options: str = "") -> None:
        instruction_sets = ffi.string(lib.np_isa_names()).decode().split(",")
        if options and options not in instruction_sets:
            raise UserError(f"backend cpu:{options}: this machine has {', '.join(instruction_sets)}")
        self._isa = options or ffi.string(lib.np_isa_name()).decode()
        self._participants: list[Participant] = []
        self._working: set[Future[None]] = set()

    @property
    def numerics(self) -> str:
        """`cpu:` and the instruction set, which alone decides the last bits."""
        return f"cpu:{self._isa}"

    def supports(self, manifest: Manifest, phase: Phase) -> str | None:
        return "an accelerator's backend is opencl or onnx" if phase == "accelerator" else None

    def load(self, placement: Placement) -> None:
        lib.np_isa_select(self._isa.encode())
        job, memory = placement.job, placement.memory
        self._rings, self._trace = Rings(memory, job.doorbell), Trace.of(job, memory)
        self._decode_workers = job.plan.compute.decode_workers()
        self._alone = job.process.role == "prefill"
        layout = self._own_stage(job) if self._alone else None
        self._own = PrivateStage(layout) if layout else None
        self._stage: Stage = self._own.buffer if self._own else lambda name: memory.view("exchange", name)
        config = self._engine_config(placement, layout or job.segments["exchange"].layout)
        threads = job.plan.compute.prefill_threads if self._alone else 1
        first_window = len(self._decode_workers) + threads * job.process.index if self._alone else job.process.index
        self._threads = ThreadPoolExecutor(threads, "participant")
        self._participants = [
            Participant(job.package.manifest, self._view(placement, first_window + number, number), config)
            for number in range(threads)
        ]

    def compute(self, work: StepWork) -> dict[str, float]:
        if self._alone:
            self._compute_together(work)
        else:
            self._participants[0].compute(work)
        return self._counters()

    def give_back(self) -> None:
        """Free private stages. Stages in the exchange segment are shared and stay."""
        wait(self._working)
        if self._own is not None:
            self._own.give_back()

    def serve_lane(self, lane: Lane) -> None:
        self._participants[0].serve_lane(lane)

    def close(self) -> None:
        """Wait for running threads, then free the engines."""
        wait(self._working)
        for participant in self._participants:
            participant.close()
        self._participants = []

    def _own_stage(self, job: Job) -> Layout:
        """Return the layout of private prefill stages, sized for the engine's own matrix products."""
        compute = job.plan.compute
        shape = dataclasses.replace(RunShape.of(compute), prefill_backend=DEFAULT_BACKEND)
        return prefill_layouts(job.package.manifest, shape, compute.prefill_chunk_tokens)["prefill_stage"]

    def _view(self, placement: Placement, window: int, number: int) -> View:
        """Return the buffers of one participant.

        window: the index of its read window and its request ring
        """
        package, memory, stage = placement.job.package, placement.memory, self._stage
        fixed, predictor = memory.view("fixed", "file"), memory.view("fixed", "predictor")
        tensors = {name: fixed[entry.start : entry.stop] for name, entry in package.fixed.items()}
        if len(predictor) and package.predictor is not None:
            tensors |= {name: predictor[entry.start : entry.stop] for name, entry in package.predictor.items()}
        return View(
            fixed=tensors,
            embedding_rows=EmbeddingRows.of(package, memory.view("fixed", "embedding_checksums")),
            residual=stage("residual"),
            queries=stage("queries"),
            attention=stage("attention"),
            hidden=stage("hidden"),
            partials=stage("partials"),
            changes=stage("changes"),
            ranks=stage("ranks"),
            predicted=stage("predicted"),
            claims=stage("claims"),
            barrier=stage("barriers"),
            logits=memory.view("exchange", "logits"),
            drafted=memory.view("exchange", "drafted"),
            kv=memory.view("kv", "kv"),
            states=memory.view("kv", "states"),
            slots=(memory.view("slots", "trigger_slots"), memory.view("slots", "value_slots")),
            entries=(memory.view("residency", "trigger_entries"), memory.view("residency", "value_entries")),
            window=memory.view("residency", "windows")[window : window + 1],
            arrivals=memory.view("residency", "arrivals"),
            in_flight=memory.view("residency", "in_flight"),
            epoch=memory.view("exchange", "epoch"),
            requests=self._rings.of(window),
            # A ring of spans has one writer; the other threads do the same work as the first.
            trace=self._trace.native if number == 0 else ffi.new("np_trace *"),
            activity=placement.activity,
            reuse=None if self._alone else native_reuse(placement.job.package.manifest, memory),
        )

    def _engine_config(self, placement: Placement, stage: Layout) -> EngineConfig:
        """Return the engine configuration that the plan implies.

        stage: the layout of the step's stages
        """
        plan, compute = placement.job.plan, placement.job.plan.compute
        prefill = placement.job.process.role == "prefill"
        hints = compute.hints and not prefill
        return EngineConfig(
            sequences=compute.sequences,
            context_tokens=compute.context_tokens,
            max_tokens=stage["residual"].shape[0],
            logit_rows=compute.logit_rows,
            kv_type=ROW_TYPES[compute.kv_type],
            state_slots=compute.state_slots,
            window_blocks=compute.prefill_window_blocks if prefill else compute.decode_window_blocks,
            partial_tokens=stage["partials"].shape[0] // placement.job.package.manifest.model.most_active_experts,
            spin_us=compute.spin_us,
            predicts=compute.mode == "predicted" or hints,
            thresholded=compute.mode == "thresholded",
            bundle=plan.flash.bundle,
            prefetch=compute.prefetch,
            pipeline=compute.pipeline,
            hints=hints,
            moved_scales=plan.memory.are_scales_moved,
        )

    def _compute_together(self, work: StepWork) -> None:
        """Compute with all participants, a thread each. The first failure is raised at once. The coordinator then
        advances the epoch, which makes the other participants leave their barriers."""
        wait(self._working)
        claims = self._stage("claims")
        claims[:] = bytes(len(claims))
        lib.np_barrier_reset(ffi.cast("np_barrier *", ffi.from_buffer(self._stage("barriers"))))
        self._working = {
            self._threads.submit(
                _compute_pinned,
                participant,
                self._core(number),
                self.multiply,
                dataclasses.replace(work, share=self._share_of(work.share, number)),
            )
            for number, participant in enumerate(self._participants)
        }
        ended, _ = wait(self._working, return_when=FIRST_EXCEPTION)
        failures = [error for future in ended if (error := future.exception()) is not None]
        for error in sorted(failures, key=lambda error: isinstance(error, Abandoned)):
            raise error

    def _share_of(self, all_blocks: Share, number: int) -> Share:
        """Return the share of one thread: the threads take turns at all blocks."""
        count = len(self._participants)
        return dataclasses.replace(all_blocks, participants=count, participant=number, sharers=count, sharer=number)

    def _core(self, number: int) -> int | None:
        """Return the core for a thread of a multi-threaded process: that of the decode worker with the same number,
        which is idle during prefill."""
        several = len(self._participants) > 1 and number < len(self._decode_workers)
        return self._decode_workers[number].core if several else None

    def _counters(self) -> dict[str, float]:
        """Return sums over the participants; times are means, so that waiting and computing add up to the step."""
        per_participant = [participant.counters() for participant in self._participants]
        return {
            name: (fmean if name.endswith("_ms") else sum)(counters[name] for counters in per_participant)
            for name in per_participant[0]
        }


class PrivateStage:
    """Stages in private memory of this process. Pages cost nothing until they are used."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._memory = mmap.mmap(-1, layout.total_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._memory)

    def buffer(self, name: str) -> memoryview:
        field = self._layout[name]
        return self._view[field.offset_bytes : field.offset_bytes + field.total_bytes]

    def give_back(self) -> None:
        """Free the pages. They read as zero afterwards."""
        self._memory.madvise(mmap.MADV_DONTNEED)


def _compute_pinned(participant: Participant, core: int | None, multiply: Multiply | None, work: StepWork) -> None:
    pin(core)
    participant.compute(work, multiply)
