"""Discrete events on the units of a device: cores, an NPU and a flash queue, which share DRAM.

A task runs on one unit. It ends when its bytes have been read and its seconds have passed, both concurrently. Units
that read at the same moment share the memory's speed: a core reads at most as fast as alone, all cores together at
most as fast as the processor can, and all units, flash included, at most as fast as the memory. A task is ready when
its predecessors have ended. Of the ready tasks, that of the lowest rank starts first, then the oldest.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterable
from typing import Literal, NamedTuple

from neuronpipe.plans.lab.devices.device_file import DeviceModel

Unit = Literal["cpu", "npu", "flash", "none"]
SETTLED_S, SETTLED_BYTES = 1e-12, 1e-3


class TaskSpan(NamedTuple):
    """A task in the trace.

    unit: `cpu.N` for core N, `npu` or `flash`
    value: number that the trace shows
    """

    unit: str
    kind: str
    layer: int
    began_s: float
    ended_s: float
    value: int


@dataclasses.dataclass(slots=True, eq=False)
class Task:
    """A piece of work on one unit.

    seconds, bytes: remaining time and bytes
    value: number that the trace shows
    """

    unit: Unit
    seconds: float
    bytes: float
    kind: str
    layer: int
    value: int
    rank: int
    waits_for: int = 0
    followers: list[Task] = dataclasses.field(default_factory=list)
    done: bool = False
    place: int = 0
    began_s: float = 0.0
    ended_s: float = 0.0


@dataclasses.dataclass
class Use:
    """The use of a device.

    busy_s: busy time by unit; that of `cpu` is the sum over cores
    exposed_io_s: time in which only flash was busy
    """

    total_s: float = 0.0
    busy_s: dict[str, float] = dataclasses.field(default_factory=dict)
    exposed_io_s: float = 0.0
    dram_bytes: float = 0.0
    max_dram_bytes_per_s: float = 0.0


class Simulation:
    """A discrete-event simulation of one device.

    cores: number of the device's fast cores that compute: its last ones, since the loader runs on the fastest
    """

    def __init__(self, device: DeviceModel, cores: int, *, keep_trace: bool = False) -> None:
        fast = device.fast_cores
        self._reads = [core.reads_gb_per_s * 1e9 for core in fast[len(fast) - cores :]]
        self._computes = [core.computes_gb_per_s * 1e9 for core in fast[len(fast) - cores :]]
        self._cpu, self._npu = device.dram_cpu_gb_per_s.value * 1e9, device.dram_npu_gb_per_s.value * 1e9
        self._total = device.dram_total_gb_per_s.value * 1e9
        self._free = list(range(len(self._reads)))
        self._running: list[Task] = []
        self._ready: dict[Unit, list[tuple[int, int, Task]]] = {"cpu": [], "npu": [], "flash": []}
        self._number = itertools.count()
        self.now_s = 0.0
        self.use = Use(busy_s={"cpu": 0.0, "npu": 0.0, "flash": 0.0})
        self.trace: list[TaskSpan] | None = [] if keep_trace else None

    @property
    def cores(self) -> int:
        return len(self._reads)

    def computing_s(self, weight_bytes: float, tokens: float) -> float:
        """Return the mean time of a core to compute weights for a number of tokens."""
        return weight_bytes * tokens * len(self._computes) / sum(self._computes)

    def add(
        self,
        unit: Unit,
        kind: str,
        layer: int,
        *,
        seconds: float = 0.0,
        bytes: float = 0.0,
        after: Iterable[Task] = (),
        value: int = 0,
        rank: int = 0,
    ) -> Task:
        """Add a task that starts after the tasks `after`. Unit `none` is a delay that occupies no unit."""
        task = Task(unit, seconds, bytes, kind, layer, value, rank)
        for before in after:
            if not before.done:
                before.followers.append(task)
                task.waits_for += 1
        if not task.waits_for:
            self._make_ready(task)
        return task

    def run(self) -> None:
        self._start()
        while self._running:
            self._advance()
            self._start()

    def _make_ready(self, task: Task) -> None:
        if task.unit == "none":
            self._begin(task)
        else:
            heapq.heappush(self._ready[task.unit], (task.rank, next(self._number), task))

    def _start(self) -> None:
        cpu = self._ready["cpu"]
        while cpu and self._free:
            task = heapq.heappop(cpu)[2]
            task.place = self._free.pop(0)
            self._begin(task)
        for unit in ("npu", "flash"):
            queue = self._ready[unit]
            if queue and not any(task.unit == unit for task in self._running):
                self._begin(heapq.heappop(queue)[2])

    def _begin(self, task: Task) -> None:
        task.began_s = self.now_s
        self._running.append(task)

    def _rates(self) -> list[float]:
        """Return the bytes per second that each running task reads; 0 for flash, whose seconds include its bytes."""
        flash = sum(task.bytes / task.seconds for task in self._running if task.unit == "flash" and task.seconds > 0)
        alone = [
            0.0
            if task.bytes <= SETTLED_BYTES
            else self._reads[task.place]
            if task.unit == "cpu"
            else self._npu
            if task.unit == "npu"
            else 0.0
            for task in self._running
        ]
        cpu = sum(rate for rate, task in zip(alone, self._running, strict=True) if task.unit == "cpu")
        cpu_share = min(1.0, self._cpu / cpu) if cpu else 1.0
        npu = sum(alone) - cpu
        total = cpu * cpu_share + npu
        available = max(self._total - flash, self._total / 10)
        share = min(1.0, available / total) if total else 1.0
        return [
            rate * share * (cpu_share if task.unit == "cpu" else 1.0)
            for rate, task in zip(alone, self._running, strict=True)
        ]

    def _advance(self) -> None:
        running, rates = self._running, self._rates()
        step = min(
            max(task.seconds, 0.0) if not rate else min(task.bytes / rate, task.seconds or task.bytes / rate)
            for task, rate in zip(running, rates, strict=True)
        )
        self.now_s += step
        units = {task.unit for task in running}
        self._count(step, units, rates)
        ended = []
        for task, rate in zip(running, rates, strict=True):
            moved = min(task.bytes, rate * step)
            if task.unit == "flash" and task.seconds > 0:
                moved = task.bytes * min(1.0, step / task.seconds)
            self.use.dram_bytes += moved
            task.bytes -= moved
            task.seconds = max(0.0, task.seconds - step)
            if task.seconds <= SETTLED_S and task.bytes <= SETTLED_BYTES:
                ended.append(task)
        for task in ended:
            self._end(task)

    def _count(self, step: float, units: set[Unit], rates: list[float]) -> None:
        use = self.use
        use.total_s += step
        for task in self._running:
            if task.unit != "none":
                use.busy_s[task.unit] += step
        if "flash" in units and not units & {"cpu", "npu"}:
            use.exposed_io_s += step
        flash = sum(task.bytes / task.seconds for task in self._running if task.unit == "flash" and task.seconds > 0)
        use.max_dram_bytes_per_s = max(use.max_dram_bytes_per_s, sum(rates) + flash)

    def _end(self, task: Task) -> None:
        self._running.remove(task)
        task.done = True
        task.ended_s = self.now_s
        unit: str = task.unit
        if task.unit == "cpu":
            self._free.append(task.place)
            self._free.sort()
            unit = f"cpu.{task.place}"
        if self.trace is not None and task.kind:
            self.trace.append(TaskSpan(unit, task.kind, task.layer, task.began_s, self.now_s, task.value))
        for follower in task.followers:
            follower.waits_for -= 1
            if not follower.waits_for:
                self._make_ready(follower)
