"""A worker that had to leave a step says so, and begins the next one afresh; so does the one after a killed worker."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from neuronpipe.native import lib
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.layouts.weights import REQUEST_ENTRIES
from neuronpipe.protocol.messages.outcome import StepAbandoned, StepDone
from neuronpipe.protocol.messages.worker import Step
from neuronpipe.services.runtime.run_memory import Epoch
from neuronpipe.services.steps.step_shares import work_of
from neuronpipe.services.worker.cpu import CpuBackend
from neuronpipe.services.worker.worker import Worker

from tests.service_job import make_job


def test_a_demand_waits_for_room_in_the_ring_until_the_epoch_changes_and_leaves_nothing_in_the_next_steps_figures(
    converted: Callable[..., Package], tmp_path: Path
) -> None:
    def fill(first: int, end: int) -> None:
        for word in range(first, end):
            trigger_entries[word] = lib.NP_ENTRY_PRESENT  # of a slot of zeros: no neuron fires, no other part is needed

    package = converted("relu2", "q8")
    job, memory = make_job("decode", package, tmp_path)
    trigger_entries, loaded = memory.view("residency", "trigger_entries"), memory.view("residency", "loaded")
    tails, epoch = memory.view("residency", "request_tails"), Epoch(memory)
    loaded[0] = 1
    tails[0] = full = REQUEST_ENTRIES  # of which a loader that does not listen has taken none
    blocks = package.manifest.layout.blocks
    shares: dict[str, Any] = {"participants": ("decode.0",), "first_blocks": (0,), "end_blocks": (blocks,)}
    step = Step(step=7, epoch=0, **shares, sequences=(0,), positions=(0,), tokens=(1,))
    worker = Worker(job, CpuBackend())
    worker.load()
    fill(0, package.manifest.layout.clusters)  # the first layer, so that there is something to count
    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(worker.answer, work_of(step, "decode.0"), StepDone)
        assert not wait([left], timeout=0.1).done
        epoch.advance()
        assert left.result(10) == StepAbandoned(step=7, epoch=0, index=0)
    assert tails[0] == full

    fill(0, package.manifest.clusters)
    memory.view("exchange", "claims")[:] = array("I", bytes(4 * len(memory.view("exchange", "claims"))))  # coordinator
    step = dataclasses.replace(step, epoch=1)
    done = worker.answer(work_of(step, "decode.0"), StepDone)
    assert isinstance(done, StepDone)
    assert done.counters["trigger_missed"] == 0
    assert done.counters["trigger_clusters"] == package.manifest.clusters


def test_a_worker_closes_the_window_that_a_killed_one_left_open(
    converted: Callable[..., Package], tmp_path: Path
) -> None:
    """It is in no step yet, and the others may wait for the slots that this window keeps."""
    job, memory = make_job("decode", converted("relu2", "q8"), tmp_path)
    windows, loaded = memory.view("residency", "windows"), memory.view("residency", "loaded")
    loaded[0] = 1
    windows[0] = 3 << 32 | 9
    others = list(windows[1:])
    worker = Worker(job, CpuBackend())
    worker.load()
    assert windows[0] == 0
    assert list(windows[1:]) == others
    worker.close()
