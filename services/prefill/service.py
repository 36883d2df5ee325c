"""The prefill worker: runs prompts through all layers, a chunk of tokens at a time, and writes their keys and values.

It computes every (weight row, token) pair by the same kernels as decode, so that a text prefilled and a text decoded
token by token have the same bits. Weights that are not resident stream through the slots: while one window of blocks
is computed, the next one is on its way.
"""

from __future__ import annotations

from neuronpipe.protocol.channel import open_context
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.messages.outcome import Prefilled
from neuronpipe.protocol.messages.worker import Prefill
from neuronpipe.services.job import Job
from neuronpipe.services.memory import RunMemory
from neuronpipe.services.service import Service
from neuronpipe.services.worker import Worker, place_of


def main(job: Job) -> None:
    """Serve until drained."""
    memory = RunMemory.open("prefill", job.segments)
    compute, threads = job.plan.compute, job.plan.compute.prefill_threads
    places = [
        place_of(
            job.plan,
            members=threads,
            member=number,
            max_tokens=max(compute.prefill_chunk_tokens, compute.logit_rows),
            window_blocks=compute.prefill_window_blocks,
            blocks=job.package.manifest.layout.blocks,
        )
        for number in range(threads)
    ]
    worker = Worker(job, memory, places, len(compute.decode_workers()) + threads * job.seat.index)
    context = open_context()
    service = Service(context, job, slots=1)
    worker.wait_until_loaded()

    def handle(message: Message) -> None:
        if isinstance(message, Prefill):
            service.step = message.step
            count = len(message.tokens)
            positions = tuple(range(message.position, message.position + count))
            logits = {"none": None, "last": (count - 1, 1), "all": (0, count)}[message.logits]
            service.answer(worker.answer(message, Prefilled, (message.sequence,) * count, positions, logits))

    service.serve(handle)
    context.close()
