"""Times of tasks: those of the cost model for a package under its plan, or by a device file for other systems.

The cost model's times include the kernels of the run, the loader's processor time, and the speed of flash for each
number of reads (plans/cost). The simulator adds order, and queueing for cores, flash and memory.
"""

from __future__ import annotations

from typing import Protocol

from neuronpipe.plans.cost.activation_rates import rates
from neuronpipe.plans.cost.expected_misses import accessed_by_any
from neuronpipe.plans.cost.io_wait import IssueTime, embedding_ms
from neuronpipe.plans.cost.step_reads import ReadOrder
from neuronpipe.plans.cost.step_work import StepWork
from neuronpipe.plans.cost.token_time import Measurements, shares_core, step_work
from neuronpipe.plans.cost.work_cost import WorkCost
from neuronpipe.plans.lab.devices.device_file import THIS_MACHINE, DeviceModel
from neuronpipe.plans.lab.shapes.models import SCALE_BITS, Parts, SimulatedModel
from neuronpipe.plans.lab.simulate.systems import System
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Plan
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

BARRIERS = 3  # per layer


@frozen
class Work:
    """Computing that is divided among all cores.

    seconds: time if all cores compute it
    bytes: weights, keys and values that are read from memory
    """

    seconds: float
    bytes: float

    def __mul__(self, share: float) -> Work:
        return Work(self.seconds * share, self.bytes * share)


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
    """Times of tasks of one layer, in seconds. A unit is a neuron or a cluster.

    whole: both parts come in one read
    gates_name_values: value parts are requested while the gates of a layer are computed
    """

    whole: bool
    gates_name_values: bool

    def attend(self) -> Work:
        """Return the products of attention, or of a recurrent layer's mixer, with keys and values."""

    def predict(self, looked: float) -> Work:
        """Return the prediction of a layer's neurons and the lookup of `looked` units."""

    def neurons(self, looked: float, fire: float) -> Work:
        """Return the triggers of looked up units and the values of firing ones."""

    def output(self) -> Work:
        """Return the product of the output matrix, once for a step."""

    def read_first(self, count: float, at_once: float) -> Read:
        """Return the cost of reading `count` trigger parts, or units if `whole`, of `at_once` that are requested
        together."""

    def read_values(self, count: float, at_once: float) -> Read:
        """Return the cost of reading `count` value parts of `at_once` that are requested together."""

    def layer_s(self) -> float:
        """Return the time in a layer in which cores wait for each other."""

    def message_s(self) -> float:
        """Return the time of the messages of a step."""


class FileCosts:
    """Times of other systems by the values of a device file. Units are neurons."""

    whole = gates_name_values = False

    def __init__(
        self,
        device: DeviceModel,
        model: SimulatedModel,
        system: System,
        *,
        context_tokens: float = 0.0,
        batch: int = 1,
        repeat: float = 1.0,
        hot_share: float = 0.0,
    ) -> None:
        """Parameters as in `Situation` and `Traffic`."""
        self._device, self._model, self._system = device, model, system
        self._context_tokens, self._batch, self._repeat, self._hot_share = context_tokens, batch, repeat, hot_share
        fast = device.fast_cores
        cores = fast[len(fast) - system.compute_cores(device) :]
        self._cores, self._bytes_per_s = len(cores), sum(core.computes_gb_per_s for core in cores) * 1e9
        self._parts = Parts.of(model)
        self._range = self._parts.whole_bytes * model.spec.neurons * model.spec.mean_active_experts
        self._quants = model.neuron_bytes * (1 - SCALE_BITS / model.bits_per_weight)

    def products(self, size_bytes: float, tokens: float) -> Work:
        """Return the products of `size_bytes` of weights and the vectors of `tokens` tokens."""
        return Work(size_bytes * tokens / self._bytes_per_s, size_bytes)

    def attend(self) -> Work:
        keys_bytes = self._model.key_value_layer_bytes(self._context_tokens) * self._batch
        return self.products(self._model.mixer_layer_bytes + keys_bytes, self._batch)

    def predict(self, looked: float) -> Work:
        model, work = self._model, Work(0.0, 0.0)
        if model.predictor_rank:
            size_bytes = model.spec.mean_active_experts * model.predictor_bytes(1 - self._hot_share)
            work = self.products(size_bytes, self._batch)
        return Work(work.seconds + looked / self._cores * self._device.lookup_ns.value * 1e-9, work.bytes)

    def neurons(self, looked: float, fire: float) -> Work:
        """A system without two phases computes all rows except Down of every looked up neuron."""
        value_rows = self._model.value_rows
        first = 1 if self._system.reads == "two-phase" else value_rows
        rows = first * looked + (1 + value_rows - first) * fire
        return self.products(rows * self._model.row_bytes, self._repeat)

    def output(self) -> Work:
        return self.products(self._model.output_bytes, self._batch)

    def read_first(self, count: float, at_once: float) -> Read:
        return self.read(count, self._parts.trigger_bytes)

    def read_values(self, count: float, at_once: float) -> Read:
        return self.read(count, self._parts.value_bytes)

    def read_both(self, count: float) -> Read:
        return self.read(count, self._parts.whole_bytes)

    def read(self, count: float, read_bytes: float) -> Read:
        size = count * read_bytes
        return Read(count, size, size / self._device.random_bytes_per_s(read_bytes, self._range, self._system.issuer))

    def stream_from(self) -> float:
        """Return the share of tokens from which on a neuron is read faster sequentially for every token (its quants)
        than at random for the tokens that want it (both parts)."""
        alone_s = self.read_first(1, 1).seconds + self.read_values(1, 1).seconds
        return self._quants / self._device.sequential_bytes_per_s() / alone_s

    def layer_s(self) -> float:
        return BARRIERS * self._device.barrier_us.value * 1e-6

    def message_s(self) -> float:
        return 0.0  # these systems are one process


class PlannedCosts:
    """The cost model's times for a package under its plan. Units are clusters. Neighbouring clusters are read together,
    as by the loader."""

    def __init__(
        self,
        manifest: Manifest,
        plan: Plan,
        measured: Measurements,
        *,
        batch: int,
        position_tokens: int,
        looked: float,
        fire: float,
    ) -> None:
        """Raises UserError if the device was not measured.

        batch, position_tokens: sequences of a step, and the tokens of each before it
        looked, fire: mean number of clusters that a step looks up, and that fire
        """
        model, compute = manifest.model, plan.compute
        self._layers, self._workers, self._depth = model.layers, len(compute.decode_workers()), plan.flash.depth
        shares = shares_core(compute)
        self._cost = WorkCost(manifest, compute.mode, self._workers, shares, *measured, kv_type=compute.kv_type)
        self._work: StepWork = step_work(
            manifest,
            rates(manifest, compute.mode),
            compute,
            plan.memory,
            plan.flash,
            measured,
            batch=batch,
            position_tokens=position_tokens,
        )
        self._embedding_ms = embedding_ms(manifest, compute, self._cost, batch)
        self._order = ReadOrder(manifest, compute, plan.memory, plan.flash)
        among = accessed_by_any(manifest, rates(manifest, compute.mode), 1.0, batch)
        self._clusters = manifest.clusters * among / sum(model.ffn_layers)
        self._looked, self._fire = max(1.0, looked), max(1.0, fire)
        self.whole = plan.flash.bundle
        self.gates_name_values = self._order.in_order and not plan.flash.bundle
        self._check_measured()

    @property
    def reads_ahead(self) -> bool:
        """True if a layer's first reads are issued while the layer before is computed."""
        return self._order.first_issued == IssueTime.AHEAD

    def attend(self) -> Work:
        work = self._work
        size_bytes = work.fixed_bytes - work.output_bytes - work.predictor_bytes
        fixed = self._fixed(size_bytes)
        return Work(fixed.seconds + _seconds(work.kv_ms), size_bytes + work.kv_bytes) * (1 / self._layers)

    def predict(self, looked: float) -> Work:
        return self._fixed(self._work.predictor_bytes) * (1 / self._layers)  # lookups are part of a step's factor

    def neurons(self, looked: float, fire: float) -> Work:
        work, of_triggers, of_values = self._work, looked / self._looked, fire / self._fire
        seconds = of_triggers * _seconds(work.triggers_ms) + of_values * _seconds(work.values_ms)
        return Work(seconds, of_triggers * work.trigger_bytes + of_values * work.value_bytes)

    def output(self) -> Work:
        return self._fixed(self._work.output_bytes)

    def read_first(self, count: float, at_once: float) -> Read:
        reads, size_bytes = self._order.first(at_once, self._clusters)
        delay_ms = 0.0 if self.reads_ahead else self._cost.read_delay_ms(together=True)
        return self._read(reads, size_bytes, delay_ms, count / at_once if at_once else 0.0)

    def read_values(self, count: float, at_once: float) -> Read:
        reads, size_bytes = self._order.values(at_once, self._clusters)
        delay_ms = self._cost.read_delay_ms(together=not self._order.in_order)
        return self._read(reads, size_bytes, delay_ms, count / at_once if at_once else 0.0)

    def _read(self, reads: float, size_bytes: float, delay_ms: float, share: float) -> Read:
        took_s = _seconds(self._cost.storage_ms(reads, size_bytes, reads, self._depth)) + delay_ms / 1e3
        loader_s = self._cost.read_overhead_ms(reads, size_bytes, reads) * self._workers / 1e3
        return Read(reads * share, size_bytes * share, took_s * share, loader_s * share)

    def _fixed(self, size_bytes: float) -> Work:
        share = size_bytes / self._work.fixed_bytes if self._work.fixed_bytes else 0.0
        return Work(share * _seconds(self._work.fixed_ms), size_bytes)

    def layer_s(self) -> float:
        """Barriers are included in the step factor or in synchronization, the wait for an accelerator is not."""
        return _seconds(self._work.waited_ms) / self._layers

    def message_s(self) -> float:
        return self._cost.synchronization_ms() / 1e3 + _seconds(self._embedding_ms)

    def _check_measured(self) -> None:
        self.attend()
        self.neurons(1.0, 1.0)


def _seconds(time_ms: float | None) -> float:
    if time_ms is None:
        raise UserError(f"{THIS_MACHINE}: flash and memory were not measured; run `neuronpipe doctor PACKAGE`")
    return time_ms / 1e3
