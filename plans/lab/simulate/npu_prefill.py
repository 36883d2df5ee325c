"""A prompt by our worker on an NPU (services/offload/npu): rows made to bytes ahead of the graphs that take them.

The schedule is the worker's. A reader goes through the rows of all products in order: qkv, attention's output, neurons
in products of up to 2,048, of each expert in turn; all fast cores make each product's rows together. There is a buffer
for each matrix of attention and two for neurons. What lies between products the cores do first: activations to integers
and back, norms, attention.
"""

from __future__ import annotations

import math
from collections import deque

from neuronpipe.plans.lab.simulate.decode import Situation
from neuronpipe.plans.lab.simulate.device_file import DeviceModel
from neuronpipe.plans.lab.simulate.events import Simulation, Task
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.plan.runtime_memory import GRAPH_TOKENS, MAX_PRODUCT_NEURONS, graphs_for
from neuronpipe.protocol.frozen import frozen

MADE_G_PER_S = 3.8
"""Rows of q4 to bytes, weights a second: measured on one core with AVX2 (services/offload/npu/README.md)."""

MADE_BY_A_MID_CORE = 0.5
"""Of that, assumed: by a core that computes 27 GB/s, the OnePlus 12's mid one, whose vectors are half as wide. NEON was
not measured. Other cores in proportion to what they compute."""

MID_COMPUTES_GB_PER_S = 27.0
FLOP_PER_WEIGHT_BYTE = 2 * 8 / 4.5 / 4
"""Of attention, assumed: multiplications of halves to floats go four at a time where those of bytes go sixteen."""

ENCODE_BYTES, DECODE_BYTES, ADD_BYTES, NORM_BYTES = 6, 6, 10, 16
"""Of each value that is read and written: a float to an integer, an integer to a float, an integer added to a float; a
norm and a residual sum."""

PART_ROWS = 256
"""That a core makes at once."""

BUFFERS = {"qkv": 1, "output": 1, "neurons": 2}
WINDOWS_AHEAD = 8
"""Products of neurons that flash may be ahead of the reader: a layer of a 7B."""


@frozen
class Prefilled:
    """seconds: of the prompt. The others are shares of it: the NPU computes; is free and has inputs, but no rows; has
    no inputs, because cores are at what lies between; flash reads."""

    seconds: float
    npu: float
    waits_for_rows: float
    waits_for_cores: float
    flash: float


def made_per_s(device: DeviceModel, cores: int) -> float:
    """Weights that one core makes to bytes in a second, on average over those that compute."""
    fast = device.fast_cores
    computes = [core.computes_gb_per_s for core in fast[len(fast) - cores :]]
    return MADE_G_PER_S * 1e9 * MADE_BY_A_MID_CORE * sum(computes) / len(computes) / MID_COMPUTES_GB_PER_S


@frozen
class Graphs:
    """What tokens cost: how many graphs compute them, and their lengths in all. Of an expert, on average."""

    count: float
    tokens: float

    @classmethod
    def of(cls, tokens: int) -> Graphs:
        """Of so many."""
        lengths = graphs_for(tokens, GRAPH_TOKENS)
        return cls(len(lengths), sum(lengths))

    @classmethod
    def expected(cls, tokens: int, chosen: float) -> Graphs:
        """Of an expert that each of so many tokens chooses with this probability."""
        if chosen >= 1:
            return cls.of(tokens)
        shares = [math.comb(tokens, n) * chosen**n * (1 - chosen) ** (tokens - n) for n in range(tokens + 1)]
        each = [cls.of(n) for n in range(tokens + 1)]
        pairs = list(zip(shares, each, strict=True))
        return cls(sum(share * one.count for share, one in pairs), sum(share * one.tokens for share, one in pairs))


def may_be_on_npu(spec: ModelSpec) -> bool:
    """Whether the worker computes such a model's products there."""
    return spec.gated and spec.activation in ("relu", "drelu") and not spec.activation_threshold


def prefilled(situation: Situation, prompt_tokens: int) -> Prefilled:
    """All of a prompt in one step."""
    return _Run(situation, prompt_tokens).run()


class _Run:
    def __init__(self, situation: Situation, tokens: int) -> None:
        device, model, system = situation.device, situation.model, situation.system
        self._device, self._model, self._spec, self._tokens = device, model, model.spec, tokens
        self._missing = 0.0 if situation.resident >= 1 else 1 - situation.resident
        self._simulation = Simulation(device, system.compute_cores(device))
        self._made_per_s = made_per_s(device, self._simulation.cores)
        self._read: deque[Task] = deque()
        self._reader: list[Task] = []  # the last rows that were made
        self._free: dict[str, deque[Task | None]] = {kind: deque([None] * count) for kind, count in BUFFERS.items()}
        self._products: list[tuple[Task, list[Task], list[Task]]] = []

    def run(self) -> Prefilled:
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
        """Each expert's products after those of the one before. In a mixture no rows are read before it is routed."""
        spec = self._spec
        chosen = spec.experts_per_token / spec.experts
        graphs = Graphs.expected(self._tokens, chosen)
        pieces = math.ceil(spec.neurons / MAX_PRODUCT_NEURONS)
        weights = len(spec.ffn_matrices) * spec.width * math.ceil(spec.neurons / pieces)
        routed = before if spec.experts > 1 else []
        for _ in range(spec.experts):
            before = self._between(layer, before, encoded=spec.width, share=chosen)
            inputs = before
            for _ in range(pieces):
                before = self._product(layer, "neurons", weights, graphs, inputs, routed)
                added = self._between(layer, before, added=spec.width, share=chosen)
            before = added
        return before

    def _product(
        self, layer: int, kind: str, weights: float, graphs: Graphs, inputs: list[Task], known: list[Task]
    ) -> list[Task]:
        simulation, device = self._simulation, self._device
        after = [*self._reader, *known]
        if (buffer := self._free[kind].popleft()) is not None:
            after.append(buffer)
        if kind == "neurons" and self._missing:
            after.append(self._flash(layer, weights * self._model.bits_per_weight / 8 * self._missing, known))
        parts = math.ceil(weights / (PART_ROWS * self._spec.width))
        seconds = weights / parts / self._made_per_s
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

    def _flash(self, layer: int, size: float, known: list[Task]) -> Task:
        """What a product's rows lack: read in order, so far ahead of the graphs; of a mixture once it is routed."""
        after = [*known, *([self._read[-1]] if self._read else [])]
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
        """Shared by all cores: what they read and write."""
        simulation, width = self._simulation, self._spec.width * norms
        of_token = width * NORM_BYTES + encoded * ENCODE_BYTES + decoded * DECODE_BYTES + added * ADD_BYTES
        each = self._tokens * share * of_token / simulation.cores
        return [simulation.add("cpu", "values", layer, bytes=each, after=before) for _ in range(simulation.cores)]

    def _attend(self, layer: int, before: list[Task]) -> list[Task]:
        """Of each token to those before it, by all cores."""
        simulation = self._simulation
        flops = 2 * 2 * self._spec.query_width * self._tokens * (self._tokens + 1) / 2
        each = simulation.computing_s(flops / FLOP_PER_WEIGHT_BYTE / simulation.cores, 1)
        return [simulation.add("cpu", "attention", layer, seconds=each, after=before) for _ in range(simulation.cores)]

    def _result(self) -> Prefilled:
        waits_for_rows = waits_for_cores = free_s = 0.0
        for task, rows, inputs in self._products:
            given_s = max((one.ended_s for one in inputs), default=0.0)
            waits_for_cores += max(0.0, given_s - free_s)
            waits_for_rows += max(0.0, max(one.ended_s for one in rows) - max(given_s, free_s))
            free_s = task.ended_s
        use = self._simulation.use
        total = use.total_s
        return Prefilled(
            seconds=total,
            npu=use.busy_s["npu"] / total,
            waits_for_rows=waits_for_rows / total,
            waits_for_cores=(waits_for_cores + total - free_s) / total,
            flash=use.busy_s["flash"] / total,
        )
