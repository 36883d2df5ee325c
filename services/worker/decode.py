"""A decode worker: computes its share of every step, together with the other decode workers."""

from __future__ import annotations

from functools import lru_cache

from neuronpipe.plans.plan.plan import ACCELERATOR
from neuronpipe.protocol.channel import open_context
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.messages.outcome import StepDone
from neuronpipe.protocol.messages.worker import Step
from neuronpipe.services.job import Job
from neuronpipe.services.service import Service
from neuronpipe.services.worker.backend import Activity, Backend, Share, StepWork, create_backend
from neuronpipe.services.worker.worker import Outcome, Worker


class DecodeService:
    """One decode worker. An experiment overrides `compute`, or `backend`.

    activity: see Placement.
    """

    def __init__(self, job: Job, activity: Activity | None = None) -> None:
        self._name = f"{job.process.role}.{job.process.index}"
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
        return self._worker.answer(work_of(step, self._name), StepDone)

    def _handle(self, message: Message) -> None:
        if isinstance(message, Step):
            self._service.step = message.step
            self._service.answer(self.compute(message))


def work_of(step: Step, name: str) -> StepWork:
    """A step as the participant of this name gets it. Raises ValueError when it is not among them."""
    return StepWork(
        number=step.step,
        epoch=step.epoch,
        sequences=step.sequences,
        positions=step.positions,
        tokens=step.tokens,
        logits_first=0,
        logits_count=len(step.tokens),
        share=_share_of(step.participants, step.first_blocks, step.end_blocks, step.held_matrices, name),
    )


@lru_cache(maxsize=8)  # of the participants of one step, who are mostly those of the last
def _share_of(
    participants: tuple[str, ...], first: tuple[int, ...], end: tuple[int, ...], matrices: tuple[str, ...], name: str
) -> Share:
    own = participants.index(name)
    ranges = list(zip(first, end, strict=True))
    sharers = [number for number, blocks in enumerate(ranges) if blocks == ranges[own]]
    return Share(
        first_block=first[own],
        end_block=end[own],
        participants=len(participants),
        participant=own,
        sharers=len(sharers),
        sharer=sharers.index(own),
        held_blocks=max((end for one, (_, end) in zip(participants, ranges, strict=True) if _holds(one)), default=0),
        held_matrices=matrices,
    )


def _holds(participant: str) -> bool:
    """Whether it holds the weights of its blocks."""
    return participant.startswith(f"{ACCELERATOR}.")
