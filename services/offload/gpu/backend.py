"""The backend `opencl` of an accelerator: the native engine goes through the steps, a device computes its blocks.

Its option is a part of the device's name, or of its platform's; the first GPU by default. The numerics are those of the
decode workers: dots.cl and kernels.cl keep the order of sums of their instructions.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from neuronpipe.native import lib
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.offloaded_blocks import Accelerator
from neuronpipe.protocol.errors import UserError
from neuronpipe.services.offload.offload_backend import HolderBackend
from neuronpipe.services.runtime.trace import Trace
from neuronpipe.services.steps.backend import Phase, Placement, StepWork
from neuronpipe.services.worker.participant import Participant, View


class OpenClBackend(HolderBackend):
    """See the module; the interface is that of services/offload/offload_backend.py."""

    name = "opencl"

    def __init__(self, options: str = "") -> None:
        super().__init__()
        self._wanted = options

    def describe(self) -> Accelerator:
        """The device that is found. Raises UserError where there is none."""
        from neuronpipe.services.offload.gpu.device import describe

        return describe(self._wanted)

    def supports(self, manifest: Manifest, phase: Phase) -> str | None:
        """Blocks of decode steps, of models of 4 and 8 bits whose activation takes no exponential."""
        if phase != "accelerator":
            return "opencl computes blocks of decode steps; write accelerator=opencl"
        if manifest.model.activation == "silu":
            return "opencl computes ReLU and its kin with the processor's bits; this model has silu"
        if manifest.quantization == "f16":
            return "opencl needs a package in q8 or q4; this one is f16"
        if manifest.trigger_quantization == "q3":
            return "opencl has no kernels for gates in q3; convert the model without `--gates q3`"
        return None

    def load(self, placement: Placement) -> None:
        """Build the engine, compile the kernels, and copy the weights to the device: blocks and matrices."""
        from neuronpipe.services.offload.block_weights import held_biases, held_weights
        from neuronpipe.services.offload.gpu.blocks import HeldBlocks
        from neuronpipe.services.offload.gpu.device import find_device, opencl
        from neuronpipe.services.offload.gpu.matrices import HeldMatrices

        lib.np_isa_select(self._isa.encode())
        job, memory = placement.job, placement.memory
        manifest, compute = job.package.manifest, job.plan.compute
        self._trace = Trace.of(job, memory)
        self._stage = lambda name: memory.view("exchange", name)
        config = dataclasses.replace(
            self._engine_config(placement, job.segments["exchange"].layout), held=True, bundle=False
        )
        device = find_device(self._wanted)
        try:
            self._held = HeldBlocks(
                device,
                manifest,
                blocks=compute.max_offloaded_blocks(),
                tokens=config.max_tokens,
                instructions=self._isa,
            )
            for weights, bias in zip(
                held_weights(job.package, self._held.blocks), held_biases(job.package), strict=True
            ):
                self._held.load(weights, bias)
            view = self._own_view(placement)
            self._matrices = HeldMatrices(
                self._held.queue,
                device,
                manifest,
                view.fixed,
                names=compute.held_matrices,
                tokens=config.max_tokens,
                instructions=self._isa,
            )
        except opencl().MemoryError:
            raise UserError(
                f"{device.name}: its memory does not hold {job.plan.memory.accelerator_bytes >> 20} MiB of weights; "
                "give it less with --gpu-memory, or end other programs that use it"
            ) from None
        self._participants = [Participant(manifest, view, config)]

    def compute(self, work: StepWork) -> dict[str, float]:
        """This participant's share of a step. Raises OpenCL's errors as they are: a device that is lost ends the
        process, and its successor looks for it anew."""
        self._held.clear_counters()
        self._participants[0].compute_held(work, self._held, self._matrices)
        counted, counters = self._held.counters(), self._counters()
        rows = counted["predicted"] + counted["active"] + (counted["fired"] if self._held.gated else 0)
        matrix_rows = counters.pop("matrix_rows")
        return counters | counted | {"held_rows": rows, "held_matrix_rows": matrix_rows}

    def close(self) -> None:
        """Free the engine and the device's memory."""
        for participant in self._participants:
            participant.close()
        self._participants = []
        self._matrices.close()
        self._held.close()

    def _own_view(self, placement: Placement) -> View:
        """Keys and values of the heads that follow from rows it computes; what it is given of attention's matrices is
        its own."""
        model, job = placement.job.package.manifest.model, placement.job
        outputs = np.zeros((job.plan.compute.sequences, max(model.qkv_rows, model.width)), np.float32)
        kv = placement.memory.view("kv", "kv")
        return dataclasses.replace(super()._own_view(placement), kv=kv, outputs=outputs)
