"""The backend `cpu`: the native engine, with one participant for each thread of the process.

A decode worker is one participant, and the other decode workers are the others: they share the exchange segment. The
prefill worker does its steps alone, by several threads over stages of its own.

Its option is the set of vector instructions (`cpu:avx2`), the best of this processor by default. Dot products of two
sets differ in their last bits, so the set is part of the numerics.
"""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from statistics import fmean

from neuronpipe.native import ffi, lib
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import DEFAULT_BACKEND
from neuronpipe.plans.plan.segment_sizes import RunShape, own_layouts
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.layout import Layout
from neuronpipe.services.runtime.core_pinning import pin
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.runtime.run_memory import Rings
from neuronpipe.services.runtime.trace import Trace
from neuronpipe.services.steps.backend import Abandoned, Phase, Placement, Share, StepWork
from neuronpipe.services.worker.external_products import Multiply
from neuronpipe.services.worker.participant import EngineConfig, Participant, View
from neuronpipe.services.worker.step_channel import Lane

Stage = Callable[[str], memoryview]
"""The buffer of one stage of a step, by its name in the layout of the exchange segment."""


class CpuBackend:
    """See the module; the interface is that of services/steps/backend.py. multiply: who computes the products of
    layers, where a prefill worker's engines do not; see Participant."""

    multiply: Multiply | None = None
    rates = True

    def __init__(self, options: str = "") -> None:
        offered = ffi.string(lib.np_isa_names()).decode()
        if options and options not in offered.split(","):
            raise UserError(f"backend cpu:{options}: this machine has {', '.join(offered.split(','))}")
        self._isa = options or ffi.string(lib.np_isa_name()).decode()
        self._participants: list[Participant] = []
        self._working: set[Future[None]] = set()

    @property
    def numerics(self) -> str:
        """The vector instructions decide the last bits, and nothing else does."""
        return f"cpu:{self._isa}"

    def supports(self, manifest: Manifest, phase: Phase) -> str | None:
        """Everything that a package can hold."""
        return "an accelerator's backend is opencl or onnx" if phase == "accelerator" else None

    def load(self, placement: Placement) -> None:
        """Build the engines."""
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
        """One native call for each participant."""
        if self._alone:
            self._compute_together(work)
        else:
            self._participants[0].compute(work)
        return self._counters()

    def give_back(self) -> None:
        """Of stages of its own; those in the exchange segment are everybody's."""
        wait(self._working)
        if self._own is not None:
            self._own.give_back()

    def serve_lane(self, lane: Lane) -> None:
        """As in Participant, for the one of a decode worker."""
        self._participants[0].serve_lane(lane)

    def close(self) -> None:
        """Free the engines."""
        wait(self._working)
        for participant in self._participants:
            participant.close()
        self._participants = []

    def _own_stage(self, job: Job) -> Layout:
        """Of steps of prefill: with what the engine's own products need, whatever the plan is for."""
        compute = job.plan.compute
        shape = dataclasses.replace(RunShape.of(compute), prefill_backend=DEFAULT_BACKEND)
        return own_layouts(job.package.manifest, shape, compute.prefill_chunk_tokens)["prefill_stage"]

    def _view(self, placement: Placement, window: int, number: int) -> View:
        """What the participant with this window and ring of requests sees."""
        package, memory, stage = placement.job.package, placement.memory, self._stage
        fixed, predictor = memory.view("fixed", "file"), memory.view("fixed", "predictor")
        tensors = {name: fixed[entry.start : entry.stop] for name, entry in package.fixed.items()}
        if len(predictor) and package.predictor is not None:
            tensors |= {name: predictor[entry.start : entry.stop] for name, entry in package.predictor.items()}
        return View(
            fixed=tensors,
            residual=stage("residual"),
            queries=stage("queries"),
            attention=stage("attention"),
            hidden=stage("hidden"),
            partials=stage("partials"),
            ranks=stage("ranks"),
            predicted=stage("predicted"),
            claims=stage("claims"),
            barrier=stage("barriers"),
            logits=memory.view("exchange", "logits"),
            kv=memory.view("kv", "kv"),
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
        )

    def _engine_config(self, placement: Placement, stage: Layout) -> EngineConfig:
        """A participant's config in steps whose stages are laid out like this, by the plan."""
        plan, compute = placement.job.plan, placement.job.plan.compute
        prefill = placement.job.process.role == "prefill"
        hints = compute.hints and not prefill
        return EngineConfig(
            sequences=compute.sequences,
            context_tokens=compute.context_tokens,
            max_tokens=stage["residual"].shape[0],
            logit_rows=compute.logit_rows,
            window_blocks=compute.prefill_window_blocks if prefill else compute.decode_window_blocks,
            partial_tokens=stage["partials"].shape[0] // placement.job.package.manifest.model.experts_per_token,
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
        """All participants, a thread each. One that cannot go on is answered for at once: the new epoch that follows
        calls away the others, who wait for it."""
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
        """The participants here take all blocks by turns."""
        count = len(self._participants)
        return dataclasses.replace(all_blocks, participants=count, participant=number, sharers=count, sharer=number)

    def _core(self, number: int) -> int | None:
        """The core of a thread, where the process may use several: that of the decode worker of the same number, which
        is idle meanwhile."""
        several = len(self._participants) > 1 and number < len(self._decode_workers)
        return self._decode_workers[number].core if several else None

    def _counters(self) -> dict[str, float]:
        """Sums over the participants; times are means, so that waiting for flash, for others and working add up."""
        counters = [participant.counters() for participant in self._participants]
        return {name: (fmean if name.endswith("_ms") else sum)(one[name] for one in counters) for name in counters[0]}


class PrivateStage:
    """Stages in memory of this process alone, so that it counts as its own. Pages cost nothing until they are used."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._memory = mmap.mmap(-1, layout.total_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._memory)

    def buffer(self, name: str) -> memoryview:
        """The bytes of one stage."""
        field = self._layout[name]
        return self._view[field.offset_bytes : field.offset_bytes + field.total_bytes]

    def give_back(self) -> None:
        """They are zero from now on, and cost nothing."""
        self._memory.madvise(mmap.MADV_DONTNEED)


def _compute_pinned(participant: Participant, core: int | None, multiply: Multiply | None, work: StepWork) -> None:
    pin(core)
    participant.compute(work, multiply)
