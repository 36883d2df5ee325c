"""The accelerator cost: time that a device with offloaded blocks takes of a decode step, in parallel with the workers.

A layer's blocks are complete when device and workers are both done. While the device computes an offloaded matrix, the
workers have nothing to compute. A device that computes on the workers' own cores takes its time from them.
"""

from __future__ import annotations

from collections.abc import Sequence

from neuronpipe.plans.device.accelerator import AcceleratorProfile
from neuronpipe.plans.device.measured_points import StepMode
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Compute, Mode
from neuronpipe.plans.plan.offloaded_blocks import matrix_bytes, matrix_shape
from neuronpipe.protocol.frozen import frozen

VECTOR_BYTES_PER_WEIGHT = 1.25  # of a prepared vector: quants, scales and sums of groups
CALLS_OF_STEP = 2  # in addition to the calls of layers: counters are cleared and read


@frozen(kw_only=True)
class OffloadedWork:
    """The device's part of a step.

    batch: sequences of the step
    trigger_bytes, value_bytes: bytes of the rows that it computes
    share: share of its neurons whose rows a sequence reads
    """

    blocks: int
    batch: int
    trigger_bytes: float
    value_bytes: float
    share: float


@frozen
class AcceleratorCost:
    """The times of one measured device with one package."""

    accelerator: AcceleratorProfile
    manifest: Manifest
    mode: Mode

    @classmethod
    def of(cls, manifest: Manifest, compute: Compute, profile: DeviceProfile | None) -> AcceleratorCost | None:
        """Return the cost of the plan's device, or None if that was not measured."""
        accelerator = profile.accelerator if profile is not None else None
        if accelerator is None or not compute.held_blocks or accelerator.name != compute.device_name:
            return None
        if all(point.quantization != manifest.quantization for point in accelerator.held):
            return None
        return cls(accelerator, manifest, compute.mode)

    def step_ms(self, work: OffloadedWork) -> float:
        """Return the time of the device in all layers of a step."""
        if not work.blocks:
            return 0.0
        model, layout, accelerator = self.manifest.model, self.manifest.layout, self.accelerator
        step_mode: StepMode = "predicted" if self.mode == "predicted" else "exact"
        speed = accelerator.offloaded_bytes_per_s(
            step_mode,
            work.batch,
            max(1e-3, min(1.0, work.share)),
            quantization=self.manifest.quantization,
            row_weights=model.width,
        )
        pairs = work.batch * model.experts_per_token
        sent_bytes = work.batch * VECTOR_BYTES_PER_WEIGHT * model.width
        if self.mode == "predicted":
            sent_bytes += min(model.experts, pairs) * work.blocks * layout.block_neurons * -(-work.batch // 8)
        returned_bytes = 4 * pairs * work.blocks.bit_count() * model.width  # nodes of the tree that the blocks make up
        layer_us = (
            accelerator.layer_call_us(work.batch, routed=model.experts > 1)
            + accelerator.copy_us(sent_bytes, back=False)
            + accelerator.copy_us(returned_bytes, back=True)
            + accelerator.run_overhead_us(step_mode)
        )
        kernels_ms = 1e3 * (work.trigger_bytes + work.value_bytes) / speed
        return kernels_ms + (model.layers * layer_us + CALLS_OF_STEP * accelerator.launch_us) / 1e3

    def matrices_ms(self, matrices: Sequence[str], batch: int) -> float:
        """Return the time of all calls for these offloaded matrices in a step.

        A call has two copies and a kernel. It is assumed to cost as much as a call for blocks, which has more of both.
        """
        model, accelerator = self.manifest.model, self.accelerator
        total_ms = 0.0
        for name in matrices:
            rows, columns = matrix_shape(model, name)
            quantization = self.manifest.quantization_of(name)
            if all(point.quantization != quantization for point in accelerator.held):
                quantization = self.manifest.quantization  # an old profile
            speed = accelerator.offloaded_bytes_per_s(
                "exact", batch, 1.0, quantization=quantization, row_weights=columns
            )
            call_us = (
                accelerator.layer_call_us(batch, routed=False)
                + accelerator.copy_us(batch * VECTOR_BYTES_PER_WEIGHT * columns, back=False)
                + accelerator.copy_us(4 * batch * rows, back=True)
            )
            calls = 1 if name == "output" else model.layers
            total_ms += calls * (1e3 * matrix_bytes(self.manifest, name) / speed + call_us / 1e3)
        return total_ms

    def waited_ms(self, step_ms: float, workers_ms: float | None) -> float | None:
        """Return how much longer a step takes because of the device.

        workers_ms: time that the workers compute in parallel
        """
        if self.accelerator.is_processor:
            return step_ms
        return None if workers_ms is None else max(0.0, step_ms - workers_ms)
