"""What decode and prefill workers share: the participants of a step that live in this process, their view of memory,
and the answer to a step."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from statistics import fmean
from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.plan import Plan
from neuronpipe.plans.plan.sizes import private_layouts
from neuronpipe.protocol.layout import Layout
from neuronpipe.protocol.messages.outcome import Prefilled, StepAbandoned, StepDone, StepFailed
from neuronpipe.protocol.messages.worker import Prefill, Step
from neuronpipe.services.job import Job
from neuronpipe.services.memory import Rings, RunMemory
from neuronpipe.services.trace import Trace
from neuronpipe.services.worker.participant import Abandoned, Damaged, EngineConfig, Participant, View
from neuronpipe.services.worker.pinning import pin

Stage = Callable[[str], Any]
"""The buffer of one stage of a step, by its name in the layout of the exchange segment."""


def exchange_stage(memory: RunMemory) -> Stage:
    """The decode workers' stages, which they all see."""
    return lambda name: memory.view("exchange", name)


def private_stage(layout: Layout) -> Stage:
    """The same for a process whose threads do its steps alone. Pages cost nothing until they are used."""
    memory = memoryview(mmap.mmap(-1, layout.total_bytes))

    def buffer(name: str) -> memoryview:
        field = layout[name]
        return memory[field.offset_bytes : field.offset_bytes + field.total_bytes]

    return buffer


def participant_view(
    package: Package,
    memory: RunMemory,
    rings: Rings,
    stage: Stage,
    window: int,
    trace: Trace | None,
    activity: array[int] | None = None,
) -> View:
    """The view of the participant with this window and ring of requests."""
    fixed = memory.view("fixed", "file")
    tensors = {name: fixed[entry.start : entry.stop] for name, entry in package.fixed.items()}
    predictor = memory.view("fixed", "predictor")
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
        epoch=memory.view("exchange", "epoch"),
        requests=rings.of(window),
        trace=trace.native if trace else ffi.new("np_trace *"),
        activity=activity,
    )


def engine_config(
    plan: Plan, stage: Layout, *, participants: int, participant: int, window_blocks: int
) -> EngineConfig:
    """A participant's config in steps whose stages are laid out like this, by the plan."""
    compute = plan.compute
    return EngineConfig(
        sequences=compute.sequences,
        context_tokens=compute.context_tokens,
        max_tokens=stage["residual"].shape[0],
        logit_rows=compute.logit_rows,
        participants=participants,
        participant=participant,
        window_blocks=window_blocks,
        partial_tokens=stage["partials"].shape[0],
        spin_us=compute.spin_us,
        predicts=compute.mode == "predicted",
        bundle=plan.flash.bundle,
        prefetch=compute.prefetch,
        pipeline=compute.pipeline,
    )


Outcome = StepDone | Prefilled | StepAbandoned | StepFailed
"""How a step went, as the coordinator is told."""


class Worker:
    """The participants of steps that live in this process: one among the decode workers, or all those of its own steps,
    a thread each.

    first_window: the first participant's window and ring; the others' follow.
    activity: uint32 [layers][blocks * block_neurons], for who wants to know which neurons fire: counts how often the
    participants here found a neuron's value other than zero. One thread counts, so it is for one participant alone.
    """

    def __init__(
        self,
        job: Job,
        memory: RunMemory,
        configs: Sequence[EngineConfig],
        first_window: int,
        activity: array[int] | None = None,
    ) -> None:
        self._activity = activity
        self._rings = Rings(memory, job.doorbell)
        self._loaded = ffi.from_buffer("uint32_t[]", memory.view("residency", "loaded"))
        self._epoch_word = ffi.from_buffer("uint32_t[]", memory.view("exchange", "epoch"))
        self._job, self._memory, self._configs, self._first_window = job, memory, configs, first_window
        self._own_steps = job.process.role == "prefill"
        self._stage: Stage = exchange_stage(memory)
        if self._own_steps:
            self._stage = private_stage(private_layouts(job.package.manifest, job.plan)["prefill_stage"])
        self._trace = Trace.of(job, memory)
        self._participants: list[Participant] = []
        self._threads = ThreadPoolExecutor(len(configs), "participant")
        self._working: set[Future[None]] = set()

    def wait_until_loaded(self) -> None:
        """Sleep until the loader has verified and sealed the fixed tensors; the engines are built then."""
        while lib.np_word_load(self._loaded) == 0:
            lib.np_word_wait(self._loaded, 0, self._epoch_word, lib.np_word_load(self._epoch_word), 0, 1000)
        package = self._job.package
        self._participants = [
            Participant(
                package.manifest,
                participant_view(
                    package,
                    self._memory,
                    self._rings,
                    self._stage,
                    self._first_window + number,
                    self._trace if number == 0 else None,  # a ring has one writer; the others do the same work
                    self._activity,
                ),
                config,
            )
            for number, config in enumerate(self._configs)
        ]

    def answer(
        self,
        ask: Step | Prefill,
        done: type[StepDone] | type[Prefilled],
        sequences: tuple[int, ...],
        positions: tuple[int, ...],
        logits: tuple[int, int] | None,
    ) -> Outcome:
        """Compute the step and say how it went. logits: see Participant.compute."""
        step, epoch, index = ask.step, ask.epoch, self._job.process.index
        work = (step, epoch, sequences, positions, ask.tokens, logits)
        try:
            if self._own_steps:
                self._compute_together(work)
            else:
                self._participants[0].compute(*work)
        except Abandoned:
            return StepAbandoned(step=step, epoch=epoch, index=index)
        except Damaged as error:
            return StepFailed(step=step, epoch=epoch, index=index, code="damaged", message=str(error))
        return done(step=step, epoch=epoch, index=index, counters=self._counters())

    def is_stale(self, ask: Step | Prefill) -> bool:
        """Whether the epoch has changed since the step was sent: nothing may be written for it any more."""
        return int(lib.np_word_load(self._epoch_word)) != ask.epoch

    def _compute_together(self, work: tuple[Any, ...]) -> None:
        """All participants, a thread each. One that cannot go on is answered for at once: the new epoch that follows
        calls away the others, who wait for it."""
        wait(self._working)
        claims = self._stage("claims")
        claims[:] = bytes(len(claims))
        lib.np_barrier_reset(ffi.cast("np_barrier *", ffi.from_buffer(self._stage("barriers"))))
        self._working = {
            self._threads.submit(_compute_pinned, participant, self._core(number), work)
            for number, participant in enumerate(self._participants)
        }
        ended, _ = wait(self._working, return_when=FIRST_EXCEPTION)
        failures = [error for future in ended if (error := future.exception()) is not None]
        for error in sorted(failures, key=lambda error: isinstance(error, Abandoned)):
            raise error

    def _core(self, number: int) -> int | None:
        """The core of a thread, where the process may use several: that of the decode worker of the same number, which
        is idle meanwhile."""
        processes = self._job.plan.compute.decode_workers()
        return processes[number].core if len(self._participants) > 1 and number < len(processes) else None

    def _counters(self) -> dict[str, float]:
        """Sums over the participants; times are means, so that waiting for flash, for others and working add up."""
        counters = [participant.counters() for participant in self._participants]
        return {name: (fmean if name.endswith("_ms") else sum)(one[name] for one in counters) for name in counters[0]}


def _compute_pinned(participant: Participant, core: int | None, work: tuple[Any, ...]) -> None:
    pin(core)
    participant.compute(*work)
