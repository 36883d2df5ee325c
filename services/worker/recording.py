"""A decode worker that records what each neuron did in the last step, in a mapped file of the run directory.

`neuronpipe profile --activity` uses it (launch/profile/activity.py). The engine writes directly to the file, a byte per
neuron. The file must be read only while no step is under way: the coordinator sends none while a client reads the
logits of a score.
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
    return directory / f"activity.{index}"


def activity_bytes(manifest: Manifest) -> int:
    """Return the size of the file: a byte per neuron, padding included, [feed-forwards][blocks * block_neurons]."""
    return manifest.model.ffns * manifest.layout.blocks * manifest.layout.block_neurons


class RecordingDecode(DecodeService):
    """A decode worker that records the neurons of the blocks it computed, by the bits of np_activity in
    native/neuronpipe.h. The neurons of a step are those of all workers together."""

    def __init__(self, job: Job) -> None:
        self._zeros = bytes(activity_bytes(job.package.manifest))
        file = os.open(activity_file(job.directory.path, job.process.index), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            os.ftruncate(file, len(self._zeros))
            self._recorded = mmap.mmap(file, len(self._zeros))
        finally:
            os.close(file)
        super().__init__(job, activity=self._recorded)

    def compute(self, step: Step) -> Outcome:
        """Compute one step. A step that was abandoned is computed and recorded again from the beginning."""
        self._recorded[:] = self._zeros
        return super().compute(step)
