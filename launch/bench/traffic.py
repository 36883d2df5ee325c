"""The bytes that a test read, from the counters of its steps and the package, and the shortest time for them."""

from __future__ import annotations

from collections.abc import Mapping

from neuronpipe.plans.device.device import Device
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.traffic import neuron_row_bytes, position_bytes, step_bytes, trigger_row_bytes
from neuronpipe.plans.plan.document import Plan
from neuronpipe.protocol.frozen import frozen

ROWS = ("gate_rows", "up_rows", "down_rows")


@frozen(kw_only=True)
class Traffic:
    """Bytes of all steps of a test.

    sequential_bytes: read from memory from end to end: matrices, keys, values, and gates except in predicted mode
    pieces_bytes: read from memory in pieces of piece_bytes: rows of neurons that lie apart
    flash_bytes, flash_reads: all reads of the loader meanwhile, prefetches included
    """

    sequential_bytes: float
    pieces_bytes: float
    piece_bytes: float
    flash_bytes: float
    flash_reads: float

    @property
    def dram_bytes(self) -> float:
        return self.sequential_bytes + self.pieces_bytes

    def dram_limit_s(self, device: Device) -> float | None:
        """Return the time of these bytes at the measured speeds of the memory; None if it was not measured."""
        speed = device.memory_speed
        if speed is None:
            return None
        pieces_s = self.pieces_bytes / speed.piece_bytes_per_s(max(1, int(self.piece_bytes)))
        return self.sequential_bytes / speed.sequential_bytes_per_s + pieces_s

    def flash_limit_s(self, device: Device, depth: int) -> float | None:
        """Return the time of the flash reads at their mean size, `depth` at once; None if flash was not measured."""
        if not self.flash_reads:
            return 0.0
        if device.flash is None:
            return None
        return self.flash_bytes / device.flash.bytes_per_s(int(self.flash_bytes / self.flash_reads), depth)


def traffic(package: Package, plan: Plan, cost: Mapping[str, float], positions: float) -> Traffic:
    """Return the traffic of the steps whose counters `cost` sums up.

    positions: number of positions whose keys and values were read, per layer
    A step reads every matrix once, and a neuron's row at most once, however many tokens need it.
    """
    manifest = package.manifest
    model, layout = manifest.model, manifest.layout
    row_bytes = neuron_row_bytes(manifest)
    fixed_bytes = step_bytes(package, predicts=plan.compute.mode == "predicted" or plan.compute.hints)
    kv_bytes = positions * position_bytes(manifest.model, plan.compute.kv_type)
    steps = cost.get("steps", 0.0)
    max_rows = steps * model.ffns * model.neurons
    gates, ups, downs = (min(cost.get(name, 0.0), max_rows) * row_bytes for name in ROWS)
    if model.gated:
        gates *= trigger_row_bytes(manifest) / row_bytes
    in_order = gates if plan.compute.mode != "predicted" else 0.0  # all gates, in order
    part_bytes = layout.cluster_neurons * row_bytes  # trigger parts are about as long
    return Traffic(
        sequential_bytes=steps * fixed_bytes + kv_bytes + in_order,
        pieces_bytes=gates - in_order + ups + downs,
        piece_bytes=part_bytes if plan.compute.mode == "predicted" else 2 * part_bytes,
        flash_bytes=cost.get("read_bytes", 0.0),
        flash_reads=cost.get("reads", 0.0),
    )
