"""A decode worker that says which neurons fire: one line of its log for each token.

neuronpipe run -p "import os" --use decode=neuronpipe.services.examples.firing:FiringLog --run /tmp/firing
tail -f /tmp/firing/decode.0.log
"""

from __future__ import annotations

from neuronpipe.native import lib
from neuronpipe.protocol.messages.outcome import StepDone
from neuronpipe.protocol.messages.worker import Step
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.worker.decode import DecodeService
from neuronpipe.services.worker.worker import Outcome


class FiringLog(DecodeService):
    """Computes as ours does, and logs the neurons of the blocks that this worker took, by layer; in a mixture by
    layer * experts + expert."""

    def __init__(self, job: Job) -> None:
        layout = job.package.manifest.layout
        self._row = layout.blocks * layout.block_neurons
        self._flags = bytearray(self._row * job.package.manifest.model.ffns)
        super().__init__(job, activity=self._flags)

    def compute(self, step: Step) -> Outcome:
        """One step; a step that was abandoned is computed again, and logged then."""
        outcome = super().compute(step)
        if isinstance(outcome, StepDone):
            fired = [divmod(place, self._row) for place, flags in enumerate(self._flags) if flags & lib.NP_ACTIVE]
            print(f"step {step.step}:", *(f"{ffn}/{neuron}" for ffn, neuron in fired), flush=True)
        self._flags[:] = bytes(len(self._flags))
        return outcome
