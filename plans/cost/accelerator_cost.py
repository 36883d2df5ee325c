"""What a device that holds blocks takes of a decode step, beside the workers that compute the others.

A layer's blocks are over when both are done; of a matrix that the device holds the others have nothing to compute. A
device that computes on the workers' own cores takes its time from them.
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
CALLS_OF_STEP = 2  # beside those of layers: counters are cleared and read


@frozen(kw_only=True)
class Held:
    """What of a step is a device's. trigger_bytes, value_bytes: of the rows that it computes; share: of its neurons,
    those whose rows a text reads."""

    blocks: int
    texts: int
    trigger_bytes: float
    value_bytes: float
    share: float


@frozen
class DeviceCost:
    """Of one device that was measured, for one package."""

    measured: AcceleratorProfile
    manifest: Manifest
    mode: Mode

    @classmethod
    def of(cls, manifest: Manifest, compute: Compute, profile: DeviceProfile | None) -> DeviceCost | None:
        """Of the device of this plan; None where that was not measured."""
        measured = profile.accelerator if profile is not None else None
        if measured is None or not compute.held_blocks or measured.name != compute.device_name:
            return None
        if all(point.quantization != manifest.quantization for point in measured.held):
            return None
        return cls(measured, manifest, compute.mode)

    def step_ms(self, held: Held) -> float:
        """All layers of a step."""
        if not held.blocks:
            return 0.0
        model, layout, found = self.manifest.model, self.manifest.layout, self.measured
        measured: StepMode = "predicted" if self.mode == "predicted" else "exact"
        speed = found.offloaded_bytes_per_s(
            measured,
            held.texts,
            max(1e-3, min(1.0, held.share)),
            quantization=self.manifest.quantization,
            row_weights=model.width,
        )
        pairs = held.texts * model.experts_per_token
        sent_bytes = held.texts * VECTOR_BYTES_PER_WEIGHT * model.width
        if self.mode == "predicted":
            sent_bytes += min(model.experts, pairs) * held.blocks * layout.block_neurons * -(-held.texts // 8)
        returned_bytes = 4 * pairs * held.blocks.bit_count() * model.width  # nodes of the tree that the blocks make up
        layer_us = (
            found.layer_call_us(held.texts, routed=model.experts > 1)
            + found.copy_us(sent_bytes, back=False)
            + found.copy_us(returned_bytes, back=True)
            + found.run_overhead_us(measured)
        )
        kernels_ms = 1e3 * (held.trigger_bytes + held.value_bytes) / speed
        return kernels_ms + (model.layers * layer_us + CALLS_OF_STEP * found.launch_us) / 1e3

    def matrices_ms(self, matrices: Sequence[str], texts: int) -> float:
        """All calls for these matrices in a step. A call, two copies and a kernel, is taken to cost a visit of blocks,
        which makes more of both."""
        model, found = self.manifest.model, self.measured
        total_ms = 0.0
        for name in matrices:
            rows, columns = matrix_shape(model, name)
            quantization = self.manifest.quantization_of(name)
            if all(point.quantization != quantization for point in found.held):
                quantization = self.manifest.quantization  # an old profile
            speed = found.offloaded_bytes_per_s("exact", texts, 1.0, quantization=quantization, row_weights=columns)
            call_us = (
                found.layer_call_us(texts, routed=False)
                + found.copy_us(texts * VECTOR_BYTES_PER_WEIGHT * columns, back=False)
                + found.copy_us(4 * texts * rows, back=True)
            )
            calls = 1 if name == "output" else model.layers
            total_ms += calls * (1e3 * matrix_bytes(self.manifest, name) / speed + call_us / 1e3)
        return total_ms

    def waited_ms(self, step_ms: float, others_ms: float | None) -> float | None:
        """What a step takes longer for it, beside what others compute meanwhile."""
        if self.measured.is_processor:
            return step_ms
        return None if others_ms is None else max(0.0, step_ms - others_ms)
