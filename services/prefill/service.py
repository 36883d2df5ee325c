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
from neuronpipe.services.prefill.keys_values import KeysValues
from neuronpipe.services.service import Service
from neuronpipe.services.worker import Outcome, Worker, engine_config


class PrefillService:
    """The prefill worker. An experiment overrides `compute`."""

    def __init__(self, job: Job) -> None:
        compute, threads = job.plan.compute, job.plan.compute.prefill_threads
        configs = [
            engine_config(
                job.plan,
                participants=threads,
                participant=number,
                max_tokens=max(compute.prefill_chunk_tokens, compute.logit_rows),
                window_blocks=compute.prefill_window_blocks,
                blocks=job.package.manifest.layout.blocks,
            )
            for number in range(threads)
        ]
        first_window = len(compute.decode_workers()) + threads * job.seat.index
        memory, model = RunMemory.open("prefill", job.segments), job.package.manifest.model
        self._keys_values = KeysValues(
            memory.view("kv", "kv"),
            layers=model.layers,
            sequences=compute.sequences,
            head_values=model.key_heads * 2,
            context_tokens=compute.context_tokens,
            head_width=model.head_width,
        )
        self._worker = Worker(job, memory, configs, first_window)
        self._context = open_context()
        self._service = Service(self._context, job, slots=1)

    def serve(self) -> None:
        """Serve until drained."""
        self._worker.wait_until_loaded()
        self._service.serve(self._handle)
        self._context.close()

    def compute(self, ask: Prefill) -> Outcome:
        """One chunk of a prompt, and how it went."""
        count = len(ask.tokens)
        positions = tuple(range(ask.position, ask.position + count))
        logits = {"none": None, "last": (count - 1, 1), "all": (0, count)}[ask.logits]
        return self._worker.answer(ask, Prefilled, (ask.sequence,) * count, positions, logits)

    def _handle(self, message: Message) -> None:
        if isinstance(message, Prefill):
            self._service.step = message.step
            if message.copy_from is not None and not self._worker.is_stale(message):
                self._keys_values.copy(message.copy_from, message.sequence, message.position)
            self._service.answer(self.compute(message))
