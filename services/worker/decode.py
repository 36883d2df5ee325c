"""A decode worker: computes its share of every step, together with the other decode workers."""

from __future__ import annotations

from array import array

from neuronpipe.protocol.channel import open_context
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.messages.outcome import StepDone
from neuronpipe.protocol.messages.worker import Step
from neuronpipe.services.job import Job
from neuronpipe.services.memory import RunMemory
from neuronpipe.services.service import Service
from neuronpipe.services.worker.worker import Outcome, Worker, engine_config


class DecodeService:
    """One decode worker. An experiment overrides `compute`.

    activity: see Worker.
    """

    def __init__(self, job: Job, activity: array[int] | None = None) -> None:
        compute, process = job.plan.compute, job.process
        config = engine_config(
            job.plan,
            job.segments["exchange"].layout,
            participants=len(compute.decode_workers()),
            participant=process.index,
            window_blocks=compute.decode_window_blocks,
        )
        self._worker = Worker(job, RunMemory.open("decode", job.segments), [config], process.index, activity)
        self._context = open_context()
        self._service = Service(self._context, job, slots=1)

    def serve(self) -> None:
        """Serve until drained."""
        self._worker.wait_until_loaded()
        self._service.serve(self._handle)
        self._context.close()

    def compute(self, step: Step) -> Outcome:
        """This worker's share of one step, and how it went."""
        return self._worker.answer(step, StepDone, step.sequences, step.positions, (0, len(step.tokens)))

    def _handle(self, message: Message) -> None:
        if isinstance(message, Step):
            self._service.step = message.step
            self._service.answer(self.compute(message))
