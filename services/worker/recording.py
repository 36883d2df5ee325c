"""A decode worker that shows what each neuron did in the last step: a byte for each, in a file of the run directory
that others map. `neuronpipe profile --activity` runs with it (launch/profile/activity.py).

The engine sets the bits where they are shown; nothing is sent. A reader must know that no step is under way: while a
client reads a score's logits, the coordinator sends none.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.protocol.messages.worker import Step
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.worker.decode import DecodeService
from neuronpipe.services.worker.worker import Outcome

RECORDING = "neuronpipe.services.worker.recording:RecordingDecode"


def activity_file(directory: Path, index: int) -> Path:
    """Where a decode worker shows it."""
    return directory / f"activity.{index}"


def activity_bytes(manifest: Manifest) -> int:
    """A byte for each neuron, padding included: [layers][experts][blocks * block_neurons]."""
    return manifest.model.ffns * manifest.layout.blocks * manifest.layout.block_neurons


class RecordingDecode(DecodeService):
    """Computes as ours does. The bits are those of np_activity in native/neuronpipe.h, of the blocks that this worker
    took; the neurons of a step are those of all workers together."""

    def __init__(self, job: Job) -> None:
        self._zeros = bytes(activity_bytes(job.package.manifest))
        file = os.open(activity_file(job.directory.path, job.process.index), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            os.ftruncate(file, len(self._zeros))
            self._shown = mmap.mmap(file, len(self._zeros))
        finally:
            os.close(file)
        super().__init__(job, activity=self._shown)

    def compute(self, step: Step) -> Outcome:
        """One step. One that was abandoned is computed again, and shown as if for the first time."""
        self._shown[:] = self._zeros
        return super().compute(step)
