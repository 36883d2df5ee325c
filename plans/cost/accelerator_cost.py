"""The accelerator cost: how long a device with offloaded weights computes in a decode step, and how long workers wait.

Device and workers compute the blocks of a layer in parallel, and the layer is complete when both are done. While the
device computes an offloaded matrix, the workers have nothing to compute. A device that computes on the workers' own
cores takes all of its time from them.
"""

from __future__ import annotations

from collections.abc import Sequence

from neuronpipe.plans.device.accelerator import AcceleratorProfile
from neuronpipe.plans.device.measured_points import StepMode
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.package.layout import BITS, Quantization
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Compute, Mode
from neuronpipe.plans.plan.offloaded_blocks import matrix_bytes, matrix_shape
from neuronpipe.protocol.frozen import frozen

VECTOR_BYTES_PER_WEIGHT = 1.25  # size of a vector prepared for kernels: quants, scales and sums of groups
CALLS_OF_STEP = 2  # calls besides those of layers: the device's counters are cleared, and read


@frozen(kw_only=True)
class OffloadedWork:
    """The device's part of a step, in all layers.

    blocks: offloaded blocks of every feed-forward
    batch: sequences of the step
    trigger_bytes, value_bytes: bytes of the rows that it computes
    share: share of the offloaded neurons whose rows a sequence reads
    """

    blocks: int
    batch: int
    trigger_bytes: float
    value_bytes: float
    share: float


@frozen
class AcceleratorCost:
    """The times of one measured accelerator with one package."""

    accelerator: AcceleratorProfile
    manifest: Manifest
    mode: Mode

    @classmethod
    def of(cls, manifest: Manifest, compute: Compute, profile: DeviceProfile | None) -> AcceleratorCost | None:
        """Return the cost of the plan's accelerator.

        None if the plan has none, or if no quantization was measured that stands for the package's.
        """
        accelerator = profile.accelerator if profile is not None else None
        if accelerator is None or not compute.held_blocks or accelerator.name != compute.device_name:
            return None
        if not any(point.quantization in _similar(manifest.quantization) for point in accelerator.held):
            return None
        return cls(accelerator, manifest, compute.mode)

    def step_ms(self, work: OffloadedWork) -> float:
        """Return the time of the device for the blocks of all layers of a step."""
        if not work.blocks:
            return 0.0
        model, layout, accelerator = self.manifest.model, self.manifest.layout, self.accelerator
        step_mode: StepMode = "predicted" if self.mode == "predicted" else "exact"
        speed = accelerator.offloaded_bytes_per_s(
            step_mode,
            work.batch,
            max(1e-3, min(1.0, work.share)),
            quantization=self._measured_like(self.manifest.quantization),
            row_weights=model.width,
        )
        pairs = work.batch * model.most_active_experts
        sent_bytes = work.batch * VECTOR_BYTES_PER_WEIGHT * model.width
        if self.mode == "predicted":
            sent_bytes += min(model.most_experts, pairs) * work.blocks * layout.block_neurons * -(-work.batch // 8)
        # Sums of blocks form binary trees: the device returns one vector for each power of two in the number of blocks.
        returned_bytes = 4 * pairs * work.blocks.bit_count() * model.width
        layer_us = (
            accelerator.layer_call_us(work.batch, routed=model.experts > 1)
            + accelerator.copy_us(sent_bytes, back=False)
            + accelerator.copy_us(returned_bytes, back=True)
            + accelerator.run_overhead_us(step_mode)
        )
        kernels_ms = 1e3 * (work.trigger_bytes + work.value_bytes) / speed
        return kernels_ms + (model.layers * layer_us + CALLS_OF_STEP * accelerator.launch_us) / 1e3

    def matrices_ms(self, matrices: Sequence[str], batch: int) -> float:
        """Return the time of all calls for these offloaded matrices in a step of `batch` sequences.

        A call is two copies and a kernel. It is assumed to cost as much as a call for blocks, which has more of both.
        """
        model, accelerator = self.manifest.model, self.accelerator
        total_ms = 0.0
        for name in matrices:
            rows, columns = matrix_shape(model, name)
            quantization = self._measured_like(self.manifest.quantization_of(name))
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

    def _measured_like(self, quantization: Quantization) -> Quantization:
        """Return the measured quantization that stands for this one, or else the one for the package's."""
        choices = (*_similar(quantization), *_similar(self.manifest.quantization))
        measured = {point.quantization for point in self.accelerator.held}
        return next(choice for choice in choices if choice in measured)

    def waited_ms(self, step_ms: float, workers_ms: float | None) -> float | None:
        """Return how long the workers wait for the device in a step; None if `workers_ms` is not known.

        step_ms: time of the device
        workers_ms: time that the workers compute in parallel
        """
        if self.accelerator.is_processor:
            return step_ms
        return None if workers_ms is None else max(0.0, step_ms - workers_ms)


def _similar(quantization: Quantization) -> tuple[Quantization, Quantization]:
    """Return the quantizations whose time per byte stands for this one, the best first: itself, and of those that
    profiles measure the one with about as many bits."""
    return quantization, "q8" if BITS[quantization] == 8 else "q4"
