"""The backend `onnx` of an accelerator: the native engine goes through the steps, graphs compute its blocks densely.

Its option is the provider (providers.py). The numerics are its own, followed by those of the decode workers: what the
graphs compute is near their bits, not equal to them.
"""

from __future__ import annotations

import dataclasses
import os

from neuronpipe.native import lib
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.offloaded_blocks import Accelerator
from neuronpipe.services.offload.npu.backend import refusal
from neuronpipe.services.offload.npu.providers import provider_of
from neuronpipe.services.offload.offload_backend import HolderBackend
from neuronpipe.services.runtime.trace import Trace
from neuronpipe.services.steps.backend import Phase, Placement, StepWork
from neuronpipe.services.worker.participant import Participant, View


class OnnxHolder(HolderBackend):
    """See the module; the interface is that of services/offload/offload_backend.py."""

    name = "onnx"

    def __init__(self, options: str = "") -> None:
        super().__init__()
        self._provider = provider_of(options)

    @property
    def numerics(self) -> str:
        """Of its blocks, and of all else in a step. Not those of a prompt whose products this provider computes."""
        return f"{self._provider.numerics}-held+{super().numerics}"

    def supports(self, manifest: Manifest, phase: Phase) -> str | None:
        """The models whose prompts the same graphs can compute."""
        return refusal(manifest)

    def describe(self) -> Accelerator:
        """The provider: what it holds lies in this machine's memory."""
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Accelerator(
            name=self._provider.device,
            memory_bytes=memory_bytes,
            max_buffer_bytes=memory_bytes,
            shares_memory=True,
            is_processor=not self._provider.needs_device,
        )

    def load(self, placement: Placement) -> None:
        """Build the engine and the sessions, and make the weights to bytes."""
        import numpy as np
        from neuronpipe.services.offload.block_weights import held_weights
        from neuronpipe.services.offload.npu.offloaded_blocks import HeldProducts
        from neuronpipe.services.offload.npu.sessions import Runtime

        lib.np_isa_select(self._isa.encode())
        job, memory = placement.job, placement.memory
        manifest = job.package.manifest
        self._trace = Trace.of(job, memory)
        self._stage = lambda name: memory.view("exchange", name)
        config = dataclasses.replace(
            self._engine_config(placement, job.segments["exchange"].layout), held=True, bundle=False
        )
        self._inputs = np.zeros((config.max_tokens, manifest.model.width), np.float32)
        self._held = HeldProducts(
            manifest,
            Runtime(self._provider).session,
            blocks=job.plan.compute.max_offloaded_blocks(),
            lengths=self._provider.held_tokens,
        )
        for weights in held_weights(job.package, self._held.blocks):
            self._held.load(weights)
        self._participants = [Participant(manifest, self._own_view(placement), config)]

    def compute(self, work: StepWork) -> dict[str, float]:
        """This participant's share of a step."""
        self._held.clear_counters()
        self._participants[0].compute_held(work, self._held)
        return self._counters() | self._held.counters()

    def close(self) -> None:
        """Free the engine; what is held goes with the process."""
        for participant in self._participants:
            participant.close()
        self._participants = []

    def _own_view(self, placement: Placement) -> View:
        return dataclasses.replace(super()._own_view(placement), inputs=self._inputs)
