"""Simulation of a prompt that our worker computes on an NPU (services/offload/npu).

The schedule is the worker's. All fast cores together unpack the rows of each product to bytes, in the order of the
products: qkv, attention's output, up to 2,048 neurons at a time, expert by expert. There is one buffer for each matrix
of attention and two for neurons. The work between products has priority: activations to integers and back, norms,
attention.
"""

from __future__ import annotations

import math
from collections import deque

from neuronpipe.plans.lab.devices.device_file import DeviceModel
from neuronpipe.plans.lab.simulate.decode import Situation
from neuronpipe.plans.lab.simulate.events import Simulation, Task
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.plan.runtime_memory import GRAPH_TOKENS, MAX_PRODUCT_NEURONS, graphs_for
from neuronpipe.protocol.frozen import frozen

UNPACKED_G_PER_S = 3.8
"""Speed of unpacking q4 rows to bytes, in 10^9 weights per second, measured on a core with AVX2
(services/offload/npu)."""

MID_CORE_UNPACKS = 0.5
"""Speed of unpacking of a core that computes MID_CORE_COMPUTES_GB_PER_S, relative to UNPACKED_G_PER_S. Assumed: the
vectors of the OnePlus 12's mid core are half as wide, and NEON was not measured. The speed of other cores is
proportional to their computes_gb_per_s."""

MID_CORE_COMPUTES_GB_PER_S = 27.0
FLOP_PER_WEIGHT_BYTE = 2 * 8 / 4.5 / 4
"""Floating-point operations of attention in the time of computing a byte of q4 weights. Assumed: four products of
halves take as long as sixteen products of bytes."""

ENCODE_BYTES, DECODE_BYTES, ADD_BYTES, NORM_BYTES = 6, 6, 10, 16
"""Bytes that are read and written for each value: float to integer, integer to float, adding an integer to a float, a
norm with a residual sum."""

PART_ROWS = 256
"""Number of rows of a task of unpacking."""

BUFFERS = {"qkv": 1, "output": 1, "neurons": 2}
WINDOWS_AHEAD = 8
"""Maximal number of neuron products that flash reads ahead: a layer of a 7B."""


@frozen
class NpuPrefill:
    """The simulated time of a prompt. All fields except `seconds` are shares of it.

    npu: the NPU computes
    waits_for_rows: the NPU has inputs, but no unpacked rows
    waits_for_cores: the NPU has no inputs, because the cores do the work between products
    flash: flash reads
    """

    seconds: float
    npu: float
    waits_for_rows: float
    waits_for_cores: float
    flash: float


def unpacked_weights_per_s(device: DeviceModel, cores: int) -> float:
    """Return the mean number of weights that a core unpacks per second, if `cores` compute."""
    fast = device.fast_cores
    computes = [core.computes_gb_per_s for core in fast[len(fast) - cores :]]
    return UNPACKED_G_PER_S * 1e9 * MID_CORE_UNPACKS * sum(computes) / len(computes) / MID_CORE_COMPUTES_GB_PER_S


@frozen
class Graphs:
    """The graphs that compute a number of tokens.

    count: number of graphs
    tokens: sum of their lengths in tokens
    """

    count: float
    tokens: float

    @classmethod
    def of(cls, tokens: int) -> Graphs:
        lengths = graphs_for(tokens, GRAPH_TOKENS)
        return cls(len(lengths), sum(lengths))

    @classmethod
    def expected(cls, tokens: int, chosen: float) -> Graphs:
        """Return the mean graphs of an expert that each of `tokens` chooses with probability `chosen`."""
        if chosen >= 1:
            return cls.of(tokens)
        shares = [math.comb(tokens, n) * chosen**n * (1 - chosen) ** (tokens - n) for n in range(tokens + 1)]
        pairs = list(zip(shares, [cls.of(n) for n in range(tokens + 1)], strict=True))
        count = sum(share * graphs.count for share, graphs in pairs)
        return cls(count, sum(share * graphs.tokens for share, graphs in pairs))


def has_npu_worker(spec: ModelSpec) -> bool:
    """Return True if the worker can compute the model on an NPU."""
    return spec.gated and spec.activation in ("relu", "drelu") and not spec.activation_threshold


def simulate_npu_prefill(situation: Situation, prompt_tokens: int) -> NpuPrefill:
    return _Run(situation, prompt_tokens).run()


class _Run:
    def __init__(self, situation: Situation, tokens: int) -> None:
        device, model, system = situation.device, situation.model, situation.system
        self._device, self._model, self._spec, self._tokens = device, model, model.spec, tokens
        self._missing = 0.0 if situation.resident >= 1 else 1 - situation.resident
        self._simulation = Simulation(device, system.compute_cores(device))
        self._unpacked_per_s = unpacked_weights_per_s(device, self._simulation.cores)
        self._read: deque[Task] = deque()
        self._reader: list[Task] = []  # unpacking of the last product's rows
        self._free: dict[str, deque[Task | None]] = {kind: deque([None] * count) for kind, count in BUFFERS.items()}
        self._products: list[tuple[Task, list[Task], list[Task]]] = []

    def run(self) -> NpuPrefill:
        spec, graphs = self._spec, Graphs.of(self._tokens)
        before: list[Task] = []
        for layer in range(spec.layers):
            before = self._between(layer, before, norms=True, encoded=spec.width)
            before = self._product(layer, "qkv", spec.qkv_rows * spec.width, graphs, before, [])
            before = self._between(layer, before, decoded=spec.qkv_rows)
            before = self._between(layer, self._attend(layer, before), encoded=spec.query_width)
            before = self._product(layer, "output", spec.width * spec.query_width, graphs, before, [])
            before = self._between(layer, before, decoded=spec.width, norms=True)
            before = self._neurons(layer, before)
        self._simulation.run()
        return self._result()

    def _neurons(self, layer: int, before: list[Task]) -> list[Task]:
        """Add the products of a feed-forward, expert by expert. In a mixture, rows are read after routing."""
        spec = self._spec
        chosen = spec.active_experts(layer) / spec.expert_counts[layer]
        graphs = Graphs.expected(self._tokens, chosen)
        pieces = math.ceil(spec.neurons / MAX_PRODUCT_NEURONS)
        weights = len(spec.ffn_matrices) * spec.width * math.ceil(spec.neurons / pieces)
        routed = before if spec.experts > 1 else []
        for _ in range(spec.expert_counts[layer]):
            before = self._between(layer, before, encoded=spec.width, share=chosen)
            inputs = before
            for _ in range(pieces):
                before = self._product(layer, "neurons", weights, graphs, inputs, routed)
                added = self._between(layer, before, added=spec.width, share=chosen)
            before = added
        return before

    def _product(
        self, layer: int, kind: str, weights: float, graphs: Graphs, inputs: list[Task], routed: list[Task]
    ) -> list[Task]:
        simulation, device = self._simulation, self._device
        after = [*self._reader, *routed]
        if (buffer := self._free[kind].popleft()) is not None:
            after.append(buffer)
        if kind == "neurons" and self._missing:
            after.append(self._flash(layer, weights * self._model.bits_per_weight / 8 * self._missing, routed))
        parts = math.ceil(weights / (PART_ROWS * self._spec.width))
        seconds = weights / parts / self._unpacked_per_s
        moved = weights * (1 + self._model.bits_per_weight / 8) / parts
        rows = [
            simulation.add("cpu", "rows", layer, seconds=seconds, bytes=moved, after=after, rank=1)
            for _ in range(parts)
        ]
        flops = 2 * weights * graphs.tokens
        seconds = flops / (device.npu_tflop_per_s.value * 1e12) + graphs.count * device.npu_start_us.value * 1e-6
        read = graphs.count * weights
        task = simulation.add("npu", kind, layer, seconds=seconds, bytes=read, after=[*rows, *inputs])
        self._products.append((task, rows, inputs))
        self._free[kind].append(task)
        self._reader = rows
        return [task]

    def _flash(self, layer: int, size: float, routed: list[Task]) -> Task:
        """Add the sequential read of a product's missing rows, at most WINDOWS_AHEAD products ahead of the NPU."""
        after = [*routed, *([self._read[-1]] if self._read else [])]
        neurons = [task for task, _, _ in self._products if task.kind == "neurons"]
        if len(neurons) > WINDOWS_AHEAD:
            after.append(neurons[-1 - WINDOWS_AHEAD])
        seconds = size / self._device.sequential_bytes_per_s()
        self._read.append(self._simulation.add("flash", "read", layer, seconds=seconds, bytes=size, after=after))
        return self._read[-1]

    def _between(
        self,
        layer: int,
        before: list[Task],
        *,
        encoded: int = 0,
        decoded: int = 0,
        added: int = 0,
        norms: bool = False,
        share: float = 1.0,
    ) -> list[Task]:
        """Add the work between products, split over all cores. It takes as long as its bytes in memory.

        encoded, decoded, added: values of a token that are converted, as in ENCODE_BYTES and so on
        """
        simulation, width = self._simulation, self._spec.width * norms
        of_token = width * NORM_BYTES + encoded * ENCODE_BYTES + decoded * DECODE_BYTES + added * ADD_BYTES
        each = self._tokens * share * of_token / simulation.cores
        return [simulation.add("cpu", "values", layer, bytes=each, after=before) for _ in range(simulation.cores)]

    def _attend(self, layer: int, before: list[Task]) -> list[Task]:
        simulation = self._simulation
        flops = 2 * 2 * self._spec.query_width * self._tokens * (self._tokens + 1) / 2
        each = simulation.computing_s(flops / FLOP_PER_WEIGHT_BYTE / simulation.cores, 1)
        return [simulation.add("cpu", "attention", layer, seconds=each, after=before) for _ in range(simulation.cores)]

    def _result(self) -> NpuPrefill:
        waits_for_rows = waits_for_cores = free_s = 0.0
        for task, rows, inputs in self._products:
            inputs_s = max((source.ended_s for source in inputs), default=0.0)
            waits_for_cores += max(0.0, inputs_s - free_s)
            waits_for_rows += max(0.0, max(row.ended_s for row in rows) - max(inputs_s, free_s))
            free_s = task.ended_s
        use = self._simulation.use
        total = use.total_s
        return NpuPrefill(
            seconds=total,
            npu=use.busy_s["npu"] / total,
            waits_for_rows=waits_for_rows / total,
            waits_for_cores=(waits_for_cores + total - free_s) / total,
            flash=use.busy_s["flash"] / total,
        )
