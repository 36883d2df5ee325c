"""The common part of decode and prefill workers: a backend over the process's memory, and the outcome of a step."""

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
"""The outcome of a step, as a message to the coordinator."""


class Worker:
    """A worker process and its backend. Raises UserError if the backend does not support the model.

    activity: as in `Placement`
    """

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
        self._backend.close()

    def answer(self, work: StepWork, done: type[StepDone] | type[Prefilled]) -> Outcome:
        """Compute the step and return its outcome.

        done: the message type for success
        """
        step, epoch, index = work.number, work.epoch, self._job.process.index
        try:
            counters = self._backend.compute(work)
        except (Abandoned, Damaged) as error:
            return self._not_done(step, epoch, error)
        return done(step=step, epoch=epoch, index=index, counters=counters)

    def give_back(self) -> None:
        """Free the memory of the backend's stages, which the next step allocates again."""
        self._backend.give_back()

    def lane(self) -> Lane | None:
        """Return this worker's step channel. It is None if all steps come as messages: the process is no decode worker,
        its index is beyond the channels, or its backend is not the native engine."""
        process, compute = self._job.process, self._job.plan.compute
        if process.role != "decode" or type(self._backend) is not CpuBackend or process.index >= Lanes.MAX_COUNT:
            return None
        return Lane(self.memory, process.index, compute.spin_us)

    def serve(self, lane: Lane) -> Outcome | None:
        """Serve the step channel. Return the outcome of a step that was abandoned or failed; None if there is none."""
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

    def is_stale(self, message: Step | Prefill) -> bool:
        """Return True if the epoch has changed since the step was sent, so that nothing may be written for it."""
        return int(lib.np_word_load(self._epoch_word)) != message.epoch
