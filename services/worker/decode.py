"""A decode worker: computes its share of every step, together with the other decode workers."""

from __future__ import annotations

from array import array

from neuronpipe.protocol.channel import open_context
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.messages.outcome import StepDone
from neuronpipe.protocol.messages.worker import Step
from neuronpipe.services.job import Job
from neuronpipe.services.service import Service
from neuronpipe.services.worker.backend import Backend, StepWork, create_backend
from neuronpipe.services.worker.worker import Outcome, Worker


class DecodeService:
    """One decode worker. An experiment overrides `compute`, or `backend`.

    activity: see Placement.
    """

    def __init__(self, job: Job, activity: array[int] | None = None) -> None:
        self._key = (job.process.role, job.process.index)
        backend = self.backend(job)
        self._worker = Worker(job, backend, activity)
        self._context = open_context()
        self._service = Service(self._context, job, slots=1, numerics=backend.numerics)

    def backend(self, job: Job) -> Backend:
        """Who computes: what the plan says."""
        return create_backend(job.process.backend)

    def serve(self) -> None:
        """Serve until drained."""
        self._worker.load()
        self._service.serve(self._handle)
        self._worker.close()
        self._context.close()

    def compute(self, step: Step) -> Outcome:
        """This worker's share of one step, and how it went."""
        return self._worker.answer(share_of(step, *self._key), StepDone)

    def _handle(self, message: Message) -> None:
        if isinstance(message, Step):
            self._service.step = message.step
            self._service.answer(self.compute(message))


def share_of(step: Step, role: str, index: int) -> StepWork:
    """A step as the participant of this role and index gets it. Raises ValueError when it is not among them."""
    keys = [(share.role, share.index) for share in step.participants]
    participant = keys.index((role, index))
    own = step.participants[participant]
    sharers = [key for key, one in zip(keys, step.participants, strict=True) if one.blocks == own.blocks]
    return StepWork(
        number=step.step,
        epoch=step.epoch,
        sequences=step.sequences,
        positions=step.positions,
        tokens=step.tokens,
        logits_first=0,
        logits_count=len(step.tokens),
        first_block=own.first_block,
        end_block=own.end_block,
        participants=len(keys),
        participant=participant,
        sharers=len(sharers),
        sharer=sharers.index((role, index)),
    )
