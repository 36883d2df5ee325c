"""The computing of the workers in a decode step: bytes that they read from memory, and the time that this takes.

Nothing here depends on the order of events: a planner adds the exposed time of flash (`io_wait.py`), a simulator the
queueing of its tasks.
"""

from __future__ import annotations

from neuronpipe.plans.cost.accelerator_cost import AcceleratorCost, OffloadedWork
from neuronpipe.plans.cost.step_bytes import StepBytes
from neuronpipe.plans.cost.work_cost import WorkCost, summed
from neuronpipe.plans.plan.offloaded_blocks import offloaded_clusters
from neuronpipe.protocol.frozen import frozen


@frozen(kw_only=True)
class StepWork:
    """The computing of a decode step in all layers, with nothing missing. A time is None if it was not measured.

    fixed_bytes: fixed tensors that the workers read, of which output_bytes are the output's and predictor_bytes the
        predictor's
    kv_bytes: keys, values and recurrent states
    trigger_bytes, value_bytes: rows of neurons that the workers compute
    in_order: every trigger is computed, in order
    device_ms: time of a measured accelerator, in parallel with the workers
    waited_ms: the part of device_ms that the workers wait for
    """

    fixed_bytes: int
    output_bytes: int
    predictor_bytes: int
    kv_bytes: int
    trigger_bytes: float
    value_bytes: float
    in_order: bool
    fixed_ms: float | None
    kv_ms: float | None
    triggers_ms: float | None
    values_ms: float | None
    device_ms: float
    waited_ms: float | None

    @classmethod
    def of(
        cls,
        sizes: StepBytes,
        cost: WorkCost,
        device: AcceleratorCost | None,
        *,
        batch: int,
        position_tokens: int,
        piece_bytes: int,
    ) -> StepWork:
        """Return the work of a step of `batch` sequences with `position_tokens` tokens each.

        piece_bytes: contiguous bytes of neurons, which have a meaning where no kernels were measured
        """
        rates, compute, factor = sizes.rates, sizes.compute, cost.step_factor()
        blocks, in_order = compute.offloaded_blocks(batch), rates.trigger_read == 1.0
        trigger_bytes, value_bytes, device_ms = _divide_rows(sizes, device, batch, blocks)
        fixed_bytes = sizes.fixed(batch) - (0 if device is None else sizes.offloaded())
        kv_bytes = batch * sizes.kv(position_tokens)
        if in_order:
            triggers_ms = cost.triggers_ms(trigger_bytes)
            values_ms = cost.values_ms(value_bytes, rates.value_read, piece_bytes)
        else:  # the kernels of both parts were measured together
            both_ms = cost.predicted_ms(trigger_bytes, value_bytes, rates.trigger_read, piece_bytes)
            share = trigger_bytes / max(1.0, trigger_bytes + value_bytes)
            triggers_ms, values_ms = _times(share, both_ms), _times(1 - share, both_ms)
        triggers_ms, values_ms = _times(factor, triggers_ms), _times(factor, values_ms)
        waited_ms: float | None = 0.0
        if device is not None:  # the workers wait while it computes a matrix
            matrices_ms = device.matrices_ms(compute.held_matrices, batch)
            waited_ms = summed(matrices_ms, device.waited_ms(device_ms, summed(triggers_ms, values_ms)))
            device_ms += matrices_ms
        elif blocks or compute.held_matrices:
            waited_ms = None  # an unmeasured device may be as fast as the workers, or a hundred times slower
        return cls(
            fixed_bytes=fixed_bytes,
            output_bytes=0 if device is not None and "output" in compute.held_matrices else sizes.output(),
            predictor_bytes=sizes.predictor(batch),
            kv_bytes=kv_bytes,
            trigger_bytes=trigger_bytes,
            value_bytes=value_bytes,
            in_order=in_order,
            fixed_ms=_times(factor, cost.fixed_ms(fixed_bytes)),
            kv_ms=_times(factor, cost.sequential_read_ms(kv_bytes)),
            triggers_ms=triggers_ms,
            values_ms=values_ms,
            device_ms=device_ms,
            waited_ms=waited_ms,
        )

    @property
    def attention_ms(self) -> float | None:
        """The time of a step outside of feed-forwards."""
        return summed(self.fixed_ms, self.kv_ms)

    @property
    def neurons_ms(self) -> float | None:
        return summed(self.triggers_ms, self.values_ms)

    @property
    def sequential_bytes(self) -> int:
        return int(self.fixed_bytes + self.kv_bytes + (self.trigger_bytes if self.in_order else 0))

    @property
    def sequential_ms(self) -> float | None:
        return summed(self.attention_ms, self.triggers_ms) if self.in_order else self.attention_ms

    @property
    def pieces_bytes(self) -> int:
        return int(self.value_bytes + (0 if self.in_order else self.trigger_bytes))

    @property
    def pieces_ms(self) -> float | None:
        return self.values_ms if self.in_order else self.neurons_ms


def _divide_rows(
    sizes: StepBytes, device: AcceleratorCost | None, batch: int, blocks: int
) -> tuple[float, float, float]:
    """Return the trigger bytes and value bytes of the workers' rows, and the time of the device for other rows. If the
    device was not measured, all rows count as the workers'."""
    rates, layout = sizes.rates, sizes.manifest.layout
    trigger_bytes, value_bytes = sizes.trigger_rows(batch), sizes.value_rows(batch)
    if device is None or not blocks:
        return trigger_bytes, value_bytes, 0.0
    share = offloaded_clusters(layout, blocks) / layout.clusters
    activation_share, is_predicted = rates.activations_within(share), sizes.compute.mode == "predicted"
    work = OffloadedWork(
        blocks=blocks,
        batch=batch,
        trigger_bytes=trigger_bytes * (activation_share if is_predicted else share),
        value_bytes=value_bytes * activation_share,
        share=(rates.trigger_read if is_predicted else rates.value_read) * activation_share / share,
    )
    return trigger_bytes - work.trigger_bytes, value_bytes - work.value_bytes, device.step_ms(work)


def _times(factor: float, time_ms: float | None) -> float | None:
    return None if time_ms is None else factor * time_ms
