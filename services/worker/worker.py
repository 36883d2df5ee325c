"""What decode and prefill workers share: a backend over this process's view of memory, and the answer to a step."""

from __future__ import annotations

from neuronpipe.native import ffi, lib
from neuronpipe.protocol.messages.outcome import Prefilled, StepAbandoned, StepDone, StepFailed
from neuronpipe.protocol.messages.worker import Prefill, Step
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.runtime.run_memory import Lanes, RunMemory
from neuronpipe.services.steps.backend import (
    Abandoned,
    Activity,
    Backend,
    Damaged,
    Placement,
    StepWork,
    phase_of,
    require,
)
from neuronpipe.services.worker.cpu import CpuBackend
from neuronpipe.services.worker.step_channel import Lane

Outcome = StepDone | Prefilled | StepAbandoned | StepFailed
"""How a step went, as the coordinator is told."""


class Worker:
    """One process and its backend. activity: see Placement. Raises UserError when the backend cannot compute this
    model."""

    def __init__(self, job: Job, backend: Backend, activity: Activity | None = None) -> None:
        require(backend, job.package.manifest, phase_of(job.process.role), f"{job.process.role}.{job.process.index}")
        self.memory = RunMemory.open(job.process.role, job.segments)
        self._job, self._backend, self._activity = job, backend, activity
        self._loaded = ffi.from_buffer("uint32_t[]", self.memory.view("residency", "loaded"))
        self._epoch_word = ffi.from_buffer("uint32_t[]", self.memory.view("exchange", "epoch"))

    def load(self) -> None:
        """Sleep until the loader has verified and sealed the fixed tensors; then load the backend."""
        while lib.np_word_load(self._loaded) == 0:
            lib.np_word_wait(self._loaded, 0, self._epoch_word, lib.np_word_load(self._epoch_word), 0, 1000)
        self._backend.load(Placement(job=self._job, memory=self.memory, activity=self._activity))

    def close(self) -> None:
        """Close the backend."""
        self._backend.close()

    def answer(self, work: StepWork, done: type[StepDone] | type[Prefilled]) -> Outcome:
        """Compute the step and say how it went."""
        step, epoch, index = work.number, work.epoch, self._job.process.index
        try:
            counters = self._backend.compute(work)
        except (Abandoned, Damaged) as error:
            return self._not_done(step, epoch, error)
        return done(step=step, epoch=epoch, index=index, counters=counters)

    def give_back(self) -> None:
        """Give the memory of the backend's stages back."""
        self._backend.give_back()

    def lane(self) -> Lane | None:
        """This worker's lane; None where its steps all come by messages: it is no decode worker, or its backend is
        another than the native engine."""
        process, compute = self._job.process, self._job.plan.compute
        if process.role != "decode" or type(self._backend) is not CpuBackend or process.index >= Lanes.MAX_COUNT:
            return None
        return Lane(self.memory, process.index, compute.spin_us)

    def serve(self, lane: Lane) -> Outcome | None:
        """Compute the steps that come by the lane. Returns how one went that is not answered there."""
        assert isinstance(self._backend, CpuBackend)
        try:
            self._backend.serve_lane(lane)
        except (Abandoned, Damaged) as error:
            return self._not_done(lane.step, lane.epoch, error)
        return None

    def _not_done(self, step: int, epoch: int, error: Abandoned | Damaged) -> Outcome:
        index = self._job.process.index
        if isinstance(error, Abandoned):
            return StepAbandoned(step=step, epoch=epoch, index=index)
        return StepFailed(step=step, epoch=epoch, index=index, code="damaged", message=str(error))

    def is_stale(self, ask: Step | Prefill) -> bool:
        """Whether the epoch has changed since the step was sent: nothing may be written for it any more."""
        return int(lib.np_word_load(self._epoch_word)) != ask.epoch
