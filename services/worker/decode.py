"""The decode worker, which computes its share of every decode step together with the other decode workers."""

from __future__ import annotations

from neuronpipe.protocol.channel import open_context
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.messages.outcome import StepDone
from neuronpipe.protocol.messages.worker import Step
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.runtime.service_base import Service
from neuronpipe.services.steps.backend import Activity, Backend, create_backend
from neuronpipe.services.steps.step_shares import work_of
from neuronpipe.services.worker.step_channel import Lane
from neuronpipe.services.worker.worker import Outcome, Worker


class DecodeService:
    """The process of role `decode`. Subclasses may override `compute` or `backend`.

    activity: as in `Placement`; with it every step comes as a message
    """

    def __init__(self, job: Job, activity: Activity | None = None) -> None:
        self._name = f"{job.process.role}.{job.process.index}"
        backend = self.backend(job)
        self._worker = Worker(job, backend, activity)
        self._context = open_context()
        drafts = getattr(backend, "drafts", False)
        self._service = Service(self._context, job, slots=1, numerics=backend.numerics, drafts=drafts)
        # A subclass that overrides `compute` must see every step, so its steps all come as messages.
        uses_channel = type(self).compute is DecodeService.compute and activity is None
        self._lane: Lane | None = self._worker.lane() if uses_channel else None

    def backend(self, job: Job) -> Backend:
        """Construct the backend that the plan names."""
        return create_backend(job.process.backend)

    def serve(self) -> None:
        """Serve until the coordinator drains the process."""
        self._worker.load()
        self._service.serve(self._handle, self._listen)
        self._worker.close()
        self._context.close()

    def compute(self, step: Step) -> Outcome:
        """Compute this worker's share of one step and return its outcome."""
        return self._worker.answer(work_of(step, self._name), StepDone)

    def _handle(self, message: Message) -> None:
        if isinstance(message, Step):
            self._service.step = message.step
            self._service.answer(self.compute(message))
            if self._lane is not None:
                self._lane.listens = True

    def _listen(self) -> int | None:
        """Compute the steps that arrive on the step channel. Return the longest wait for a message, in milliseconds:
        0 while the channel is in use; None: no limit."""
        if self._lane is None or not self._lane.listens:
            return None
        if (outcome := self._worker.serve(self._lane)) is not None:
            self._service.answer(outcome)
        self._service.step = max(self._service.step, self._lane.step)
        return 0 if self._lane.listens else None
