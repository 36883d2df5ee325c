"""Times of tasks on a device: by the values of a device file, or by the planner's costs for a package under its plan.

The planner's costs include the kernels of the run, the loader's processor time, and the speed of flash for each number
of reads.
"""

from __future__ import annotations

from typing import Literal, Protocol

from neuronpipe.plans.cost.activation_rates import rates
from neuronpipe.plans.cost.expected_misses import joined_reads
from neuronpipe.plans.cost.work_cost import WorkCost
from neuronpipe.plans.lab.devices.device_file import THIS_MACHINE, DeviceModel
from neuronpipe.plans.lab.shapes.models import SCALE_BITS, Parts, SimulatedModel
from neuronpipe.plans.lab.simulate.systems import System
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.traffic import neuron_row_bytes, trigger_row_bytes
from neuronpipe.plans.plan.document import Plan
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

Kernel = Literal["matrix", "neurons"]
BARRIERS = 3  # per layer


@frozen
class Read:
    """A number of reads and their cost.

    seconds: time of flash
    loader_s: processor time of the loader, if it shares a core with a worker
    """

    reads: float
    bytes: float
    seconds: float
    loader_s: float = 0.0


class Costs(Protocol):
    """Times of tasks, in seconds. A unit is a neuron or a cluster.

    parts: sizes of parts
    rows: rows of the trigger that are computed per looked up unit
    value_rows: rows of each other matrix that are computed per firing unit
    whole: both parts come in one read
    gates_name_values: value parts are requested while the gates of a layer are computed
    """

    parts: Parts
    rows: float
    value_rows: float
    whole: bool
    gates_name_values: bool

    def core_s(self, kernel: Kernel, size_bytes: float, tokens: float) -> float:
        """Return a core's time for `size_bytes` of weights in memory, for `tokens`, while all cores compute."""

    def read(self, count: float, read_bytes: float, at_once: float, *, first: bool) -> Read:
        """Return the cost of reading `count` parts of `read_bytes`.

        at_once: number of parts of the layer that are requested together
        first: the parts are trigger parts or whole clusters, not value parts
        """

    def lookups_s(self, count: float) -> float:
        """Return a core's time for lookups."""

    def layer_s(self) -> float:
        """Return the time in a layer in which cores wait for each other."""

    def message_s(self) -> float:
        """Return the time of the messages of a step."""


class FileCosts:
    """Times by the values of a device file. Units are neurons."""

    def __init__(self, device: DeviceModel, model: SimulatedModel, system: System) -> None:
        self._device, self._issuer = device, system.issuer
        fast = device.fast_cores
        cores = fast[len(fast) - system.compute_cores(device) :]
        self._computes = sum(core.computes_gb_per_s for core in cores) * 1e9 / len(cores)
        self.parts, self.rows, self.value_rows, self.whole = Parts.of(model), 1.0, 1.0, False
        self.gates_name_values = False
        self._range = self.parts.whole_bytes * model.spec.neurons * model.spec.mean_active_experts
        self._quants = model.neuron_bytes * (1 - SCALE_BITS / model.bits_per_weight)
        self._messages = system.name == "ours"  # the others are one process

    def core_s(self, kernel: Kernel, size_bytes: float, tokens: float) -> float:
        return size_bytes * tokens / self._computes

    def read(self, count: float, read_bytes: float, at_once: float, *, first: bool) -> Read:
        size = count * read_bytes
        return Read(count, size, size / self._device.random_bytes_per_s(read_bytes, self._range, self._issuer))

    def stream_from(self) -> float:
        """Return the share of tokens from which on a neuron is read faster sequentially for every token (its quants)
        than at random for the tokens that want it (both parts)."""
        parts = (self.parts.trigger_bytes, self.parts.value_bytes)
        alone_s = sum(self.read(1, size, 1, first=True).seconds for size in parts)
        return self._quants / self._device.sequential_bytes_per_s() / alone_s

    def lookups_s(self, count: float) -> float:
        return count * self._device.lookup_ns.value * 1e-9

    def layer_s(self) -> float:
        return BARRIERS * self._device.barrier_us.value * 1e-6

    def message_s(self) -> float:
        return self._messages * self._device.message_us.value * 1e-6


class PlannedCosts:
    """Times by the planner's costs for a package under its plan. Units are clusters. Neighbouring clusters are read
    together, as by the loader."""

    def __init__(self, manifest: Manifest, plan: Plan, cost: WorkCost, looked: float, fire: float) -> None:
        """Raises UserError if the device was not measured.

        looked, fire: mean number of clusters that a token looks up, and that fire
        """
        model, layout, read = manifest.model, manifest.layout, rates(manifest, plan.compute.mode)
        self._manifest, self._plan, self._cost = manifest, plan, cost
        self._workers, self._matrices = len(plan.compute.decode_workers()), 2 if model.gated else 1
        computed = model.active_ffns * model.neurons
        triggers, values = computed * read.trigger_read, computed * read.down_read
        values += computed * read.value_read if model.gated else 0.0
        moved = plan.memory.are_scales_moved
        self.parts = Parts(layout.trigger_part_bytes, layout.value_read_bytes(moved=moved))
        self.rows, self.value_rows = triggers / max(1.0, looked), values / self._matrices / max(1.0, fire)
        self.whole = plan.flash.bundle
        self.gates_name_values = plan.compute.mode != "predicted" and not plan.flash.bundle
        self._clusters = layout.clusters * model.mean_active_experts
        value_row = neuron_row_bytes(manifest)
        trigger_bytes = triggers * trigger_row_bytes(manifest)
        kernels_s = self._kernels_s(trigger_bytes, values * value_row, value_row)
        self._neurons_s = kernels_s / (trigger_bytes + values * value_row)
        self._matrix_s = _measured_ms(cost.fixed_ms(1e9)) / 1e12

    def _kernels_s(self, trigger_bytes: float, value_bytes: float, row_bytes: int) -> float:
        read, cost = rates(self._manifest, self._plan.compute.mode), self._cost
        if self._plan.compute.mode == "predicted":
            return _measured_ms(cost.predicted_ms(trigger_bytes, value_bytes, read.trigger_read, row_bytes)) / 1e3
        triggers_ms = _measured_ms(cost.triggers_ms(trigger_bytes))
        return (triggers_ms + _measured_ms(cost.values_ms(value_bytes, read.value_read, row_bytes))) / 1e3

    def core_s(self, kernel: Kernel, size_bytes: float, tokens: float) -> float:
        each_s = self._matrix_s if kernel == "matrix" else self._neurons_s
        return self._cost.step_factor() * size_bytes * tokens * each_s * self._workers

    def read(self, count: float, read_bytes: float, at_once: float, *, first: bool) -> Read:
        layout, flash = self._manifest.layout, self._plan.flash
        in_order = first and self._plan.compute.mode != "predicted"  # all missing triggers are read, in their order
        of = round(at_once) if in_order else self._clusters
        reads, size = joined_reads(round(at_once), of, round(read_bytes), layout.cluster_stride_bytes, flash)
        delay_ms = self._cost.read_delay_ms(together=self._plan.compute.mode == "predicted")
        took_s = (_measured_ms(self._cost.storage_ms(reads, size, reads, flash.depth)) + delay_ms) / 1e3
        loader_s = self._cost.read_overhead_ms(reads, size, reads) * self._workers / 1e3
        share = count / max(1.0, at_once)
        return Read(reads * share, size * share, took_s * share, loader_s * share)

    def lookups_s(self, count: float) -> float:
        return 0.0  # included in step_factor()

    def layer_s(self) -> float:
        return 0.0  # included in step_factor() or synchronization_ms()

    def message_s(self) -> float:
        return self._cost.synchronization_ms() / 1e3


def _measured_ms(time_ms: float | None) -> float:
    if time_ms is None:
        raise UserError(f"{THIS_MACHINE}: flash and memory were not measured; run `neuronpipe doctor PACKAGE`")
    return time_ms
