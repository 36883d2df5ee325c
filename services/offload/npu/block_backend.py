"""The offload backend `onnx`: graphs compute the offloaded blocks of decode steps densely.

The backend's option is the provider (providers.py). The numerics name the provider's arithmetic, followed by that of
the decode workers: the results of the graphs are close to theirs, but do not have the same bits.
"""

from __future__ import annotations

import dataclasses
import os

from neuronpipe.native import lib
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.offloaded_blocks import Accelerator
from neuronpipe.services.offload.npu.backend import refusal
from neuronpipe.services.offload.npu.providers import provider_of
from neuronpipe.services.offload.offload_backend import OffloadBackend
from neuronpipe.services.runtime.trace import Trace
from neuronpipe.services.steps.backend import Phase, Placement, StepWork
from neuronpipe.services.worker.participant import Participant, View


class OnnxOffloadBackend(OffloadBackend):
    """The offload backend `onnx`; the interface is that of services/offload/offload_backend.py."""

    name = "onnx"

    def __init__(self, options: str = "") -> None:
        super().__init__()
        self._provider = provider_of(options)

    @property
    def numerics(self) -> str:
        """The numerics of the offloaded blocks, followed by those of the rest of a step.

        They differ from the numerics of prompts whose products this provider computes.
        """
        return f"{self._provider.numerics}-held+{super().numerics}"

    def supports(self, manifest: Manifest, phase: Phase) -> str | None:
        return refusal(manifest)

    def describe(self) -> Accelerator:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Accelerator(
            name=self._provider.device,
            memory_bytes=memory_bytes,
            max_buffer_bytes=memory_bytes,
            shares_memory=True,
            is_processor=not self._provider.needs_device,
        )

    def load(self, placement: Placement) -> None:
        """Build the engine and the sessions, and convert the weights to bytes."""
        import numpy as np
        from neuronpipe.services.offload.block_weights import offloaded_weights
        from neuronpipe.services.offload.npu.offloaded_blocks import OffloadedProducts
        from neuronpipe.services.offload.npu.sessions import Runtime

        lib.np_isa_select(self._isa.encode())
        job, memory = placement.job, placement.memory
        manifest = job.package.manifest
        self._trace = Trace.of(job, memory)
        self._stage = lambda name: memory.view("exchange", name)
        config = dataclasses.replace(
            self._engine_config(placement, job.segments["exchange"].layout), offload_blocks=True, bundle=False
        )
        self._inputs = np.zeros((config.max_tokens, manifest.model.width), np.float32)
        self._products = OffloadedProducts(
            manifest,
            Runtime(self._provider).session,
            blocks=job.plan.compute.max_offloaded_blocks(),
            lengths=self._provider.offload_graph_tokens,
        )
        for weights in offloaded_weights(job.package, self._products.blocks):
            self._products.load(weights)
        self._participants = [Participant(manifest, self._own_view(placement), config)]

    def compute(self, work: StepWork) -> dict[str, float]:
        self._products.clear_counters()
        self._participants[0].compute_offloaded(work, self._products)
        return self._counters() | self._products.counters()

    def close(self) -> None:
        for participant in self._participants:
            participant.close()
        self._participants = []

    def _own_view(self, placement: Placement) -> View:
        return dataclasses.replace(super()._own_view(placement), inputs=self._inputs)
