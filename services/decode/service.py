"""A decode worker: computes its share of every step, together with the other decode workers."""

from __future__ import annotations

from neuronpipe.protocol.channel import open_context
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.messages.outcome import StepDone
from neuronpipe.protocol.messages.worker import Step
from neuronpipe.services.job import Job
from neuronpipe.services.memory import RunMemory
from neuronpipe.services.service import Service
from neuronpipe.services.worker import Worker, place_of


def main(job: Job) -> None:
    """Serve until drained."""
    memory = RunMemory.open("decode", job.segments)
    compute, seat = job.plan.compute, job.seat
    place = place_of(
        job.plan,
        members=len(compute.decode_workers()),
        member=seat.index,
        max_tokens=compute.sequences,
        window_blocks=compute.decode_window_blocks,
        blocks=job.package.manifest.layout.blocks,
    )
    worker = Worker(job, memory, [place], seat.index)
    context = open_context()
    service = Service(context, job, slots=1)
    worker.wait_until_loaded()

    def handle(message: Message) -> None:
        if isinstance(message, Step):
            service.step = message.step
            logits = (0, len(message.tokens))
            service.answer(worker.answer(message, StepDone, message.sequences, message.positions, logits))

    service.serve(handle)
    context.close()
