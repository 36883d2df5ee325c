"""Simulation of decode, token by token and layer by layer: a system's tasks on a device's units."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from neuronpipe.plans.lab.devices.device_file import DeviceModel
from neuronpipe.plans.lab.shapes.models import SCALE_BITS, SimulatedModel
from neuronpipe.plans.lab.simulate.caching import Traffic
from neuronpipe.plans.lab.simulate.events import Simulation, Task, TaskSpan, Use
from neuronpipe.plans.lab.simulate.systems import System
from neuronpipe.plans.lab.simulate.task_times import Costs, FileCosts, PlannedCosts, Read, Work
from neuronpipe.plans.package.layout import PAGE_BYTES
from neuronpipe.protocol.frozen import frozen

LOADER_RANK = -1  # the kernel schedules the loader first, since it was asleep
STREAMED_READ_BYTES = 512 << 10
READ_GROUPS = 6  # groups into which a layer's misses are split, so that reading and computing overlap
MAPPED_READ_BYTES = 128 << 10  # size of the kernel's read-ahead


@frozen
class Situation:
    """The device, model, system and costs of a simulation.

    context_tokens: mean number of tokens before a generated one
    resident: share of the feed-forward's weights in memory
    """

    device: DeviceModel
    model: SimulatedModel
    system: System
    costs: Costs
    context_tokens: float
    resident: float
    batch: int = 1


@frozen
class Decoded:
    """The times and reads of a simulated decode.

    token_s: seconds of each step
    use: sums over all steps
    trace: spans of the last steps, if they were traced
    """

    token_s: tuple[float, ...]
    use: Use
    dram_bytes_per_step: float
    flash_bytes_per_step: float
    flash_reads_per_step: float
    trace: tuple[tuple[TaskSpan, ...], ...]


def _spanned(size_bytes: float) -> float:
    """Return the mean bytes of the pages that contain a row of `size_bytes` at a random place."""
    return (1 + (size_bytes - 1) / PAGE_BYTES) * PAGE_BYTES


def decode(
    situation: Situation,
    traffic: Traffic,
    traced_tokens: int = 0,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Decoded:
    """Simulate a step for each token of the traffic; the last `traced_tokens` with a trace.

    progress: receives the numbers of simulated tokens and of all tokens
    """
    tokens = len(traffic.looked)
    seconds, traces, use = [], [], Use(busy_s={"cpu": 0.0, "npu": 0.0, "flash": 0.0})
    flash_bytes = flash_reads = 0.0
    for n in range(tokens):
        traced = n >= tokens - traced_tokens
        step = _Token(situation, traffic, n, traced)
        seconds.append(step.run())
        flash_bytes, flash_reads = flash_bytes + step.flash_bytes, flash_reads + step.flash_reads
        _add(use, step.simulation.use)
        if step.simulation.trace is not None:
            traces.append(tuple(step.simulation.trace))
        progress(n + 1, tokens)
    count = max(1, tokens)
    return Decoded(tuple(seconds), use, use.dram_bytes / count, flash_bytes / count, flash_reads / count, tuple(traces))


def _add(total: Use, step_use: Use) -> None:
    total.total_s += step_use.total_s
    total.exposed_io_s += step_use.exposed_io_s
    total.dram_bytes += step_use.dram_bytes
    total.max_dram_bytes_per_s = max(total.max_dram_bytes_per_s, step_use.max_dram_bytes_per_s)
    for unit, busy in step_use.busy_s.items():
        total.busy_s[unit] += busy


class _Token:
    def __init__(self, situation: Situation, traffic: Traffic, number: int, traced: bool) -> None:
        self._situation, self._traffic, self._number = situation, traffic, number
        self._device, self._model, self._system = situation.device, situation.model, situation.system
        self._costs = situation.costs
        self.flash_bytes = self.flash_reads = 0.0
        cores = self._system.compute_cores(self._device)
        self.simulation = Simulation(self._device, cores, keep_trace=traced)

    def run(self) -> float:
        """Simulate the step and return its duration in seconds."""
        earlier: list[Task] = []  # the end of the layer before the one before
        before: list[Task] = []
        for layer in range(self._model.spec.layers):
            end = self._mapped(layer, before) if self._system.mapped else self._layer(layer, before, earlier)
            earlier, before = before, [end]
        self._on_cores("logits", 0, self._costs.output(), before)
        self.simulation.run()
        between_s = self._costs.message_s()
        self.simulation.use.total_s += between_s
        return self.simulation.now_s + between_s

    def _layer(self, layer: int, before: list[Task], earlier: list[Task]) -> Task:
        early = self._system.early
        predicted = self._predict(layer, before) if early else []
        attended = self._attention(layer, [*before, *predicted])
        if not early:
            predicted = self._predict(layer, attended)
        ends = [*attended, *predicted]
        if self._traffic.hot_share:
            ends.append(self._hot(layer, [*attended, *self._stream(layer, before, attended)]))
        reads_from = earlier if isinstance(self._costs, PlannedCosts) and self._costs.reads_ahead else predicted
        computes_from = [*attended, *predicted]
        ends += self._cold(layer, reads_from, computes_from)
        return self.simulation.add("none", "", layer, seconds=self._costs.layer_s(), after=ends)

    def _attention(self, layer: int, after: list[Task]) -> list[Task]:
        if not self._system.npu:
            return self._on_cores("attend", layer, self._costs.attend(), after)
        model = self._model
        keys = model.key_value_layer_bytes(self._situation.context_tokens) * self._situation.batch
        start = self._device.npu_start_us.value * 1e-6
        bytes = model.mixer_layer_bytes * (1 - SCALE_BITS / model.bits_per_weight) + keys  # per-channel scales
        return [self.simulation.add("npu", "attend", layer, seconds=start, bytes=bytes, after=after)]

    def _predict(self, layer: int, after: list[Task]) -> list[Task]:
        looked = float(self._traffic.looked[self._number, layer])
        return self._on_cores("predict", layer, self._costs.predict(looked), after, value=round(looked))

    def _hot(self, layer: int, after: list[Task]) -> Task:
        model = self._model
        rows = self._traffic.hot_share * model.spec.neurons * model.spec.mean_active_experts
        bytes = rows * model.neuron_bytes * (1 - SCALE_BITS / model.bits_per_weight)
        start = self._device.npu_start_us.value * 1e-6
        return self.simulation.add("npu", "neurons", layer, seconds=start, bytes=bytes, after=after, value=round(rows))

    def _stream(self, layer: int, before: list[Task], attended: list[Task]) -> list[Task]:
        """Add the sequential read of absent hot neurons: during attention, in a mixture after routing."""
        model, share = self._model, self._traffic.streamed_share
        if not share:
            return []
        neurons = share * model.spec.neurons * model.spec.mean_active_experts
        size = neurons * model.neuron_bytes * (1 - SCALE_BITS / model.bits_per_weight)
        self.flash_bytes, self.flash_reads = self.flash_bytes + size, self.flash_reads + size / STREAMED_READ_BYTES
        seconds = size / self._device.sequential_bytes_per_s(STREAMED_READ_BYTES)
        return [self._from_flash(layer, size, seconds, before if model.spec.experts == 1 else attended)]

    def _cold(self, layer: int, reads_from: list[Task], computes_from: list[Task]) -> list[Task]:
        t, n, costs = self._traffic, self._number, self._costs
        looked, fire = float(t.looked[n, layer]), float(t.fire[n, layer])
        triggers, values = float(t.trigger_misses[n, layer]), float(t.value_misses[n, layer])
        if not self._system.pipeline:
            after = [*computes_from, *self._reads(layer, triggers, reads_from)]
            return self._on_cores("neurons", layer, costs.neurons(looked, fire), after, value=round(fire))
        if costs.gates_name_values:
            return self._named_by_gates(layer, reads_from, computes_from)
        resident = costs.neurons(max(0.0, looked - triggers), max(0.0, fire - values))
        ends = self._on_cores("neurons", layer, resident, computes_from, value=round(fire))
        return ends + self._pipelined(layer, triggers, values, reads_from, computes_from)

    def _named_by_gates(self, layer: int, reads_from: list[Task], computes_from: list[Task]) -> list[Task]:
        """Add a layer block by block, as the engine computes it in exact mode: the resident gates of a block, then the
        resident values of neurons that fired. Missing values are read when their gate has fired."""
        t, n, costs = self._traffic, self._number, self._costs
        looked, fire = float(t.looked[n, layer]), float(t.fire[n, layer])
        triggers, values = float(t.trigger_misses[n, layer]), float(t.value_misses[n, layer])
        of_missing_gates = values * triggers / max(1.0, looked)
        named_values = (values - of_missing_gates) / READ_GROUPS
        gates_work = costs.neurons(max(0.0, looked - triggers) / READ_GROUPS, 0.0)
        resident = costs.neurons(0.0, max(0.0, fire - values) / READ_GROUPS)
        ends = self._pipelined(layer, triggers, of_missing_gates, reads_from, computes_from)
        after = computes_from
        for _ in range(READ_GROUPS):
            gates = self._on_cores("neurons", layer, gates_work, after)
            read = self._read(layer, costs.read_values(named_values, values), gates)
            after = self._on_cores("neurons", layer, resident, gates)
            ends += [*after, self._cluster(layer, costs.neurons(0.0, named_values), [read])]
        return ends

    def _pipelined(
        self, layer: int, triggers: float, values: float, reads_from: list[Task], computes_from: list[Task]
    ) -> list[Task]:
        """Add missing clusters in groups, each in the stages of PowerInfer-2's paper: gate I/O, gate, up and down I/O,
        up and down."""
        costs, ends = self._costs, []
        groups = min(READ_GROUPS, math.ceil(max(triggers, values)))
        for _ in range(groups):
            gates, ups = triggers / groups, values / groups
            first_read = self._read(layer, costs.read_first(gates, triggers), reads_from)
            if costs.whole:
                ends.append(self._cluster(layer, costs.neurons(gates, ups), [first_read, *computes_from]))
                continue
            gate = self._cluster(layer, costs.neurons(gates, 0.0), [first_read, *computes_from])
            values_read = self._read(layer, costs.read_values(ups, values), [gate])
            ends.append(self._cluster(layer, costs.neurons(0.0, ups), [values_read]))
        return ends

    def _reads(self, layer: int, triggers: float, after: list[Task]) -> list[Task]:
        """Add the reads of a system without a pipeline."""
        assert isinstance(self._costs, FileCosts)
        row, value_rows, costs = self._model.row_bytes, self._model.value_rows, self._costs
        if not triggers:
            return []
        if self._system.reads == "matrices":
            return [self._read(layer, costs.read(triggers * (1 + value_rows), _spanned(row)), after)]
        if self._system.reads == "row-column":
            gate = self._read(layer, costs.read(triggers, _spanned(row)), after)
            return [gate, self._read(layer, costs.read(triggers, _spanned(value_rows * row)), after)]
        return [self._read(layer, costs.read_both(triggers), after)]

    def _read(self, layer: int, read: Read, after: list[Task]) -> Task:
        if read.reads <= 0:
            return self.simulation.add("none", "", layer, after=after)
        self.flash_bytes, self.flash_reads = self.flash_bytes + read.bytes, self.flash_reads + read.reads
        task = self._from_flash(layer, read.bytes, read.seconds, after)
        if not read.loader_s:
            return task
        # The loader works on what has arrived while flash reads the rest, and on the last piece within a read's delay.
        loader = self.simulation.add("cpu", "read", layer, seconds=read.loader_s, after=after, rank=LOADER_RANK)
        return self.simulation.add("none", "", layer, after=[task, loader])

    def _from_flash(self, layer: int, bytes: float, seconds: float, after: Sequence[Task]) -> Task:
        return self.simulation.add(
            "flash", "read", layer, seconds=seconds, bytes=bytes, after=after, value=round(bytes)
        )

    def _cluster(self, layer: int, work: Work, after: Sequence[Task]) -> Task:
        seconds = work.seconds * self.simulation.cores
        return self.simulation.add("cpu", "neurons", layer, seconds=seconds, bytes=work.bytes, after=after)

    def _on_cores(self, kind: str, layer: int, work: Work, after: Sequence[Task], *, value: int = 0) -> list[Task]:
        cores = self.simulation.cores
        return [
            self.simulation.add(
                "cpu", kind, layer, seconds=work.seconds, bytes=work.bytes / cores, after=after, value=value // cores
            )
            for _ in range(cores)
        ]

    def _mapped(self, layer: int, before: list[Task]) -> Task:
        """Add a dense layer that reads mapped pages. If the model does not fit memory, all pages miss, since the page
        cache is LRU and layers are read in a cycle."""
        assert isinstance(self._costs, FileCosts)
        model, spec = self._model, self._model.spec
        attended = self._attention(layer, before)
        bytes = spec.neurons * model.neuron_bytes * spec.mean_active_experts
        after = attended
        if self._situation.resident < 1:
            seconds = bytes / self._device.sequential_bytes_per_s(MAPPED_READ_BYTES)
            self.flash_bytes, self.flash_reads = self.flash_bytes + bytes, self.flash_reads + bytes / MAPPED_READ_BYTES
            after = [self._from_flash(layer, bytes, seconds, attended)]
        ends = self._on_cores("neurons", layer, self._costs.products(bytes, self._situation.batch), after)
        return self.simulation.add("none", "", layer, seconds=2e-6 * self._device.barrier_us.value, after=ends)
