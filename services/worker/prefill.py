"""The prefill worker, which computes prompts a chunk of tokens at a time and writes their keys and values.

It computes every (weight row, token) pair by the same kernels as decode, so that prefill and decode of the same tokens
give the same bits. Weights that are not resident stream through the slots: while one window of blocks is computed, the
next one is being read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from neuronpipe.native import lib
from neuronpipe.plans.models.attention_sizes import CachedVectors
from neuronpipe.plans.package.layout import row_bytes
from neuronpipe.plans.plan.document import KvType
from neuronpipe.protocol.channel import open_context
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.memory.segments import Segment
from neuronpipe.protocol.messages.outcome import Prefilled, Released
from neuronpipe.protocol.messages.worker import Prefill, Release
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.runtime.service_base import Service
from neuronpipe.services.steps.backend import Backend, Share, StepWork, create_backend
from neuronpipe.services.steps.scored_tokens import Ratings
from neuronpipe.services.worker.worker import Outcome, Worker


class PrefillService:
    """The process of role `prefill`. Subclasses may override `compute` or `backend`."""

    def __init__(self, job: Job) -> None:
        compute, manifest, backend = job.plan.compute, job.package.manifest, self.backend(job)
        self._blocks, self._vocabulary = manifest.layout.blocks, manifest.model.vocabulary
        self._index = job.process.index
        self._logit_rows, self._rates = compute.logit_rows, getattr(backend, "rates", False)
        self._worker = Worker(job, backend)
        self._keys_values = KeysValues(
            self._worker.memory.view("kv", "kv"),
            self._worker.memory.segments["kv"],
            manifest.model.cached_vectors,
            kv_type=compute.kv_type,
            sequences=compute.sequences,
            context_tokens=compute.context_tokens,
        )
        self._context = open_context()
        drafts = getattr(backend, "drafts", False)
        self._service = Service(self._context, job, slots=1, numerics=backend.numerics, drafts=drafts)

    def backend(self, job: Job) -> Backend:
        """Construct the backend that the plan names."""
        return create_backend(job.process.backend)

    def serve(self) -> None:
        """Serve until the coordinator drains the process."""
        self._worker.load()
        self._service.serve(self._handle)
        self._worker.close()
        self._context.close()

    def compute(self, chunk: Prefill) -> Outcome:
        """Compute one chunk of a prompt and return its outcome."""
        if not chunk.targets:
            return self._worker.answer(self._work(chunk, 0, len(chunk.tokens), chunk.logits), Prefilled)
        ratings = Ratings(chunk.targets, min(chunk.likely, self._vocabulary))
        if self._rates:
            work = self._work(chunk, 0, len(chunk.tokens), "none")
            work.ratings = ratings
            outcome = self._worker.answer(work, Prefilled)
        else:
            outcome = self._rate_by_logits(chunk, ratings)
        return dataclasses.replace(outcome, ratings=ratings.ratings()) if isinstance(outcome, Prefilled) else outcome

    def _rate_by_logits(self, chunk: Prefill, ratings: Ratings) -> Outcome:
        """Fill the scores from logits, as many tokens at a time as there are logit rows, for a backend that computes
        only logits."""
        counters: dict[str, float] = {}
        for first in range(0, len(chunk.tokens), self._logit_rows):
            count = min(self._logit_rows, len(chunk.tokens) - first)
            outcome = self._worker.answer(self._work(chunk, first, count, "all"), Prefilled)
            if not isinstance(outcome, Prefilled):
                return outcome
            ratings.read(self._worker.memory.view("exchange", "logits"), self._vocabulary, first, count)
            counters = {name: counters.get(name, 0.0) + value for name, value in outcome.counters.items()}
        return Prefilled(step=chunk.step, epoch=chunk.epoch, index=self._index, counters=counters)

    def _work(self, chunk: Prefill, first: int, count: int, logits: Literal["none", "last", "all"]) -> StepWork:
        """Return the step for `count` tokens of the chunk, beginning with its token `first`."""
        logits_first, logits_count = {"none": (0, 0), "last": (count - 1, 1), "all": (0, count)}[logits]
        begin = chunk.position + first
        states = [(before, after) for tokens, before, after in chunk.state_runs for _ in range(tokens)]
        states = states[first : first + count]
        return StepWork(
            number=chunk.step,
            epoch=chunk.epoch,
            sequences=(chunk.sequence,) * count,
            positions=range(begin, begin + count),
            tokens=chunk.tokens[first : first + count],
            logits_first=logits_first,
            logits_count=logits_count,
            share=Share(first_block=0, end_block=self._blocks),
            states_from=[before for before, _ in states],
            states_to=[after for _, after in states],
        )

    def _handle(self, message: Message) -> None:
        if isinstance(message, Prefill):
            self._service.step = message.step
            if message.copy_from is not None and not self._worker.is_stale(message):
                self._keys_values.copy(message.copy_from, message.sequence, message.position)
            self._service.answer(self.compute(message))
        elif isinstance(message, Release):
            self._worker.give_back()
            for slot, tokens in enumerate(message.keep_tokens):
                self._keys_values.forget_behind(slot, tokens)
            self._service.answer(Released())


class KeysValues:
    """The KV cache of all sequences: prefixes are copied between slots instead of computed again, and unused memory is
    freed.

    view: the KV segment's array, flat: for each layer [sequences][vectors][context_tokens][words of a vector]
    layers: the vectors of a position, for each layer
    kv_type: the type of their elements
    """

    def __init__(
        self,
        view: memoryview,
        segment: Segment,
        layers: Sequence[CachedVectors],
        *,
        kv_type: KvType = "f16",
        sequences: int,
        context_tokens: int,
    ) -> None:
        self._view, self._segment = view, segment
        self._layers = [(count, row_bytes(kv_type, width) // view.itemsize) for count, width in layers]
        self._sequences, self._context_tokens = sequences, context_tokens

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` positions of one slot to another. The copy is idempotent.

        Raises ValueError for a slot or a length out of range.
        """
        if not (
            0 <= source < self._sequences and 0 <= target < self._sequences and 0 <= tokens <= self._context_tokens
        ):
            raise ValueError(f"copying {tokens} tokens from slot {source} to {target}: there is no such place")
        for (read, width), (write, _) in zip(self._places(source), self._places(target), strict=True):
            self._view[write : write + tokens * width] = self._view[read : read + tokens * width]

    def forget_behind(self, slot: int, tokens: int) -> None:
        """Free the memory of this slot's positions from `tokens` on, in whole pages. Raises ValueError for a slot or a
        length out of range."""
        if not (0 <= slot < self._sequences and 0 <= tokens <= self._context_tokens):
            raise ValueError(f"forgetting slot {slot} behind {tokens} tokens: there is no such place")
        first_byte = self._segment.layout["kv"].offset_bytes
        for place, width in self._places(slot):
            begin = first_byte + self._view.itemsize * (place + tokens * width)
            freed_bytes = self._view.itemsize * (self._context_tokens - tokens) * width
            lib.np_file_give_back(self._segment.fd, begin, freed_bytes)

    def _places(self, slot: int) -> Iterator[tuple[int, int]]:
        """Yield the index of this slot's first position in `view` and the width of a vector, for keys and values of
        every head of every layer."""
        first = 0
        for count, width in self._layers:
            stride = self._context_tokens * width
            for vector in range(slot * count, (slot + 1) * count):
                yield first + vector * stride, width
            first += self._sequences * count * stride
