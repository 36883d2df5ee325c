"""A decode worker that logs which neurons fire, one line per step.

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
    """A decode worker that logs the active neurons of the blocks it computed, as `layer/neuron`; in a mixture of
    experts as `layer * experts + expert/neuron`."""

    def __init__(self, job: Job) -> None:
        layout = job.package.manifest.layout
        self._row = layout.blocks * layout.block_neurons
        self._flags = bytearray(self._row * job.package.manifest.model.ffns)
        super().__init__(job, activity=self._flags)

    def compute(self, step: Step) -> Outcome:
        """Compute a step and log its active neurons. An abandoned step is logged when it is repeated."""
        outcome = super().compute(step)
        if isinstance(outcome, StepDone):
            fired = [divmod(place, self._row) for place, flags in enumerate(self._flags) if flags & lib.NP_ACTIVE]
            print(f"step {step.step}:", *(f"{ffn}/{neuron}" for ffn, neuron in fired), flush=True)
        self._flags[:] = bytes(len(self._flags))
        return outcome
