"""A worker that had to leave a step says so, and begins the next one afresh."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from neuronpipe.native import lib
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.channel import Connection, open_context
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.errors import Full
from neuronpipe.protocol.messages.outcome import StepAbandoned, StepDone
from neuronpipe.protocol.messages.worker import Step
from neuronpipe.services.member import Place
from neuronpipe.services.memory import RunMemory
from neuronpipe.services.worker import Worker

from tests.service_job import make_job


def test_a_step_left_for_a_loader_that_does_not_listen_leaves_nothing_in_the_next_ones_figures(
    converted: Callable[..., Package], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(connection: Connection, content: Message) -> None:
        raise Full("loader link: the queue is full")

    def fill(first: int, end: int) -> None:
        for word in range(first, end):
            gate_words[word] = lib.NP_WORD_PRESENT  # of a slot of zeros: no neuron fires, no other part is needed

    monkeypatch.setattr(Connection, "send", full)
    package = converted("relu2", "q8")
    job, memory = make_job("decode", package, tmp_path)
    gate_words, loaded = memory.view("residency", "gate_words"), memory.view("residency", "loaded")
    loaded[0] = 1
    compute = job.plan.compute
    place = Place(
        sequences=compute.sequences,
        context_tokens=compute.context_tokens,
        most_tokens=compute.sequences,
        logit_rows=compute.logit_rows,
        members=1,
        share_from=0.0,
        share_to=1.0,
        window_blocks=compute.decode_window_blocks,
        spin_us=0,
        prefetch=False,
    )
    step = Step(step=7, epoch=0, sequences=(0,), positions=(0,), tokens=(1,))
    with open_context() as context:
        worker = Worker(job, RunMemory.open("decode", job.segments), context, place, 0, private=False)
        worker.wait_until_loaded()
        fill(0, package.manifest.layout.clusters)  # the first layer, so that there is something to count
        left = worker.answer(step, StepDone, step.sequences, step.positions, None)
        assert left == StepAbandoned(step=7, epoch=0, index=0)

        fill(0, package.manifest.words)
        done = worker.answer(step, StepDone, step.sequences, step.positions, None)
        assert isinstance(done, StepDone)
        assert done.counters["gate_missed"] == 0
        assert done.counters["gate_clusters"] == package.manifest.words
