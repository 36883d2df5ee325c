"""The device profile: what was found and measured on a machine. Plain data, to and from JSON; `id` names the machine.

The id covers what a plan relies on and what stays the same from one start to the next: not free memory, and not the
flash curve, which is measured anew and differs a little every time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from typing import Any

from neuronpipe.plans.device.cores import Core

# Kernels keep a little for themselves, not always the same: without rounding an update would make a new device.
MEMORY_ROUNDING_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashPoint:
    """Random reads of one size with so many under way at once, and what came of it."""

    request_bytes: int
    depth: int
    bytes_per_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashCurve:
    """How fast the package's storage is read; not `direct`: without direct I/O, so that the page cache answered."""

    engine: str
    direct: bool
    points: tuple[FlashPoint, ...]

    def bytes_per_s(self, request_bytes: int, depth: int) -> float:
        """Speed to expect: at the nearest depth measured; between sizes a line on logarithmic scales, flat beyond."""
        nearest = min({point.depth for point in self.points}, key=lambda measured: abs(math.log(measured / depth)))
        line = sorted((math.log(p.request_bytes), math.log(p.bytes_per_s)) for p in self.points if p.depth == nearest)
        wanted = min(max(math.log(request_bytes), line[0][0]), line[-1][0])
        for (x0, y0), (x1, y1) in itertools.pairwise(line):
            if x0 <= wanted <= x1:
                return math.exp(y0 + (y1 - y0) * (wanted - x0) / (x1 - x0))
        return math.exp(line[0][1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One machine as this process may use it. Sizes in bytes; None: no limit, or nothing to measure on."""

    architecture: str
    instruction_set: str  # of the kernels in use, e.g. "avx512"
    cores: tuple[Core, ...]
    cpu_quota: float | None  # in cores
    memory_total_bytes: int
    memory_available_bytes: int
    page_bytes: int
    memlock_bytes: int | None
    io_uring: bool
    flash: FlashCurve | None

    @property
    def id(self) -> str:
        """Sixteen hexadecimal digits: another machine, or other rights on this one, have others."""
        memory = round(self.memory_total_bytes / MEMORY_ROUNDING_BYTES)
        cores = [dataclasses.astuple(core) for core in self.cores]
        rights = [self.cpu_quota, memory, self.page_bytes, self.io_uring]
        stable = [self.architecture, self.instruction_set, cores, rights]
        return hashlib.sha256(json.dumps(stable).encode()).hexdigest()[:16]

    @property
    def flash_engine(self) -> str:
        """The reader's engine to plan with: "io_uring" or "threads"."""
        return "io_uring" if self.io_uring else "threads"

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the id."""
        return {"id": self.id, **dataclasses.asdict(self)}


def device_from_json(data: dict[str, Any]) -> Device:
    """The inverse of Device.to_json. Raises KeyError, TypeError or ValueError when it is none."""
    fields = {name: value for name, value in data.items() if name != "id"}
    fields["cores"] = tuple(Core(**core) for core in data["cores"])
    fields["flash"] = None if data["flash"] is None else curve_from_json(data["flash"])
    return Device(**fields)


def curve_from_json(data: dict[str, Any]) -> FlashCurve:
    """A flash curve from its plain values. Raises KeyError, TypeError or ValueError when it is none."""
    points = tuple(FlashPoint(**point) for point in data["points"])
    if not points or any(p.request_bytes < 1 or p.depth < 1 or not p.bytes_per_s > 0 for p in points):
        raise ValueError("a flash curve has points, and all of its figures are positive")
    return FlashCurve(engine=str(data["engine"]), direct=bool(data["direct"]), points=points)
