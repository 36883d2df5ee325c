"""The backend `opencl` of an accelerator: a device computes offloaded blocks while the native engine goes through
steps.

The option is a part of the device's or its platform's name; the default is the first GPU. The numerics are those of the
decode workers: dots.cl and sums.cl sum in the order of their instruction set.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from neuronpipe.native import lib
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.offloaded_blocks import Accelerator
from neuronpipe.protocol.errors import UserError
from neuronpipe.services.offload.offload_backend import OffloadBackend
from neuronpipe.services.runtime.trace import Trace
from neuronpipe.services.steps.backend import Phase, Placement, StepWork
from neuronpipe.services.worker.participant import Participant, View


class OpenClBackend(OffloadBackend):
    """Offloaded blocks and matrices on an OpenCL device."""

    name = "opencl"

    def __init__(self, options: str = "") -> None:
        super().__init__()
        self._device_name = options

    def describe(self) -> Accelerator:
        from neuronpipe.services.offload.gpu.device import describe

        return describe(self._device_name)

    def supports(self, manifest: Manifest, phase: Phase) -> str | None:
        """Return None for an accelerator and a quantized model without SiLU, latents and gates in q3, or why not."""
        if phase != "accelerator":
            return "opencl computes blocks of decode steps; write accelerator=opencl"
        if manifest.model.all_neurons_fire:
            return f"opencl computes activation functions of the ReLU kind; this model has {manifest.model.activation}"
        if manifest.model.all_state_elements or manifest.model.gated_attention:
            return "opencl computes neither recurrent layers, draft layers nor gated attention; this model has them"
        if manifest.model.latent_width:
            return "opencl does not compute attention with latents, which this model has"
        if manifest.model.norms_after or manifest.model.logit_cap:
            return "opencl computes neither norms of outputs nor caps; this model has them"
        if manifest.model.do_heads_differ:
            return "opencl does not compute heads that differ between layers, which this model has"
        if manifest.quantization == "f16":
            return "opencl needs a quantized package; this one is f16"
        if manifest.trigger_quantization == "q3":
            return "opencl has no kernels for gates in q3; convert the model without `--gates q3`"
        return None

    def load(self, placement: Placement) -> None:
        """Create the engine, compile the kernels, and copy the weights of blocks and matrices to the device. Raises
        UserError if they do not fit the device's memory."""
        from neuronpipe.services.offload.block_weights import offloaded_biases, offloaded_weights
        from neuronpipe.services.offload.gpu.blocks import OffloadedBlocks
        from neuronpipe.services.offload.gpu.device import find_device, opencl
        from neuronpipe.services.offload.gpu.matrices import OffloadedMatrices

        lib.np_isa_select(self._isa.encode())
        job, memory = placement.job, placement.memory
        manifest, compute = job.package.manifest, job.plan.compute
        self._trace = Trace.of(job, memory)
        self._stage = lambda name: memory.view("exchange", name)
        config = dataclasses.replace(
            self._engine_config(placement, job.segments["exchange"].layout), offload_blocks=True, bundle=False
        )
        device = find_device(self._device_name)
        try:
            self._blocks = OffloadedBlocks(
                device,
                manifest,
                blocks=compute.max_offloaded_blocks(),
                tokens=config.max_tokens,
                instructions=self._isa,
            )
            for weights, bias in zip(
                offloaded_weights(job.package, self._blocks.blocks), offloaded_biases(job.package), strict=True
            ):
                self._blocks.load(weights, bias)
            view = self._own_view(placement)
            self._matrices = OffloadedMatrices(
                self._blocks.queue,
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
        """Compute this participant's share of a step. OpenCL's errors are raised unchanged: a lost device ends the
        process, whose successor looks for it again."""
        self._blocks.clear_counters()
        self._participants[0].compute_offloaded(work, self._blocks, self._matrices)
        device_counters, counters = self._blocks.counters(), self._counters()
        up_rows = device_counters["fired"] if self._blocks.gated else 0
        rows = device_counters["predicted"] + device_counters["active"] + up_rows
        matrix_rows = counters.pop("matrix_rows")
        return counters | device_counters | {"held_rows": rows, "held_matrix_rows": matrix_rows}

    def close(self) -> None:
        for participant in self._participants:
            participant.close()
        self._participants = []
        self._matrices.close()
        self._blocks.close()

    def _own_view(self, placement: Placement) -> View:
        model, job = placement.job.package.manifest.model, placement.job
        outputs = np.zeros((job.plan.compute.sequences, max(model.qkv_rows, model.width)), np.float32)
        kv = placement.memory.view("kv", "kv")
        return dataclasses.replace(super()._own_view(placement), kv=kv, outputs=outputs)
