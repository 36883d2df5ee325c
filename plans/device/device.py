"""The device profile: what was found and measured on a machine. Plain data; `id` names the machine.

The id covers the hardware. It leaves out limits (of memory, of processor time, which cores a process may use, whether
it may use io_uring): the same machine inside a container is the same device, and planning applies its limits. It also
leaves out the measured speeds, which differ a little every time.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from typing import TYPE_CHECKING

from neuronpipe.plans.device.cores import Core
from neuronpipe.plans.device.measured_figures import interpolate, interpolate_all
from neuronpipe.protocol.frozen import frozen

if TYPE_CHECKING:
    from neuronpipe.plans.device.profile import DeviceProfile

# Of `former_id`. Kernels keep a little memory for themselves, not always the same.
MEMORY_ROUNDING_BYTES = 64 << 20


@frozen(kw_only=True)
class FlashPoint:
    """Random reads of one size with so many under way at once, and what came of it."""

    request_bytes: int
    depth: int
    bytes_per_s: float


@frozen(kw_only=True)
class FlashCurve:
    """How fast the package's storage is read; not `direct`: without direct I/O, so that the page cache answered."""

    engine: str
    direct: bool
    points: tuple[FlashPoint, ...]
    spread: float = 0.0  # of the least steady point: how far its repetitions lie from their median, as a share of it
    busy: float = 0.0  # share of the machine that other programs had meanwhile

    def __post_init__(self) -> None:
        if not self.points or any(p.request_bytes < 1 or p.depth < 1 or p.bytes_per_s <= 0 for p in self.points):
            raise ValueError("a flash curve has points, and all of its figures are positive")

    def bytes_per_s(self, request_bytes: int, depth: float) -> float:
        """Speed to expect: between sizes and depths lines on logarithmic scales, flat beyond."""
        asked = request_bytes, depth
        if asked not in self._known:  # a search asks for the same ones thousands of times
            by_depth = (((point.depth, point.request_bytes), point.bytes_per_s) for point in self.points)
            self._known[asked] = interpolate_all(by_depth, (depth, request_bytes))
        return self._known[asked]

    @functools.cached_property
    def _known(self) -> dict[tuple[int, float], float]:
        return {}


@frozen(kw_only=True)
class PiecePoint:
    """Reading pieces of one size with gaps between them, on all decode cores together; gaps do not count."""

    piece_bytes: int
    bytes_per_s: float


@frozen(kw_only=True)
class MemorySpeed:
    """How fast memory is read: from end to end by one thread and by `threads`, and in pieces by `threads`."""

    threads: int
    one_thread_bytes_per_s: float
    sequential_bytes_per_s: float
    pieces: tuple[PiecePoint, ...]
    spread: float = 0.0  # of the least steady figure: how far its second best repetition is below the best
    busy: float = 0.0  # share of the machine that other programs had meanwhile

    def __post_init__(self) -> None:
        figures = [self.threads, self.one_thread_bytes_per_s, self.sequential_bytes_per_s]
        figures += [figure for point in self.pieces for figure in (point.piece_bytes, point.bytes_per_s)]
        if not self.pieces or min(figures) <= 0:
            raise ValueError("memory speeds have pieces, and all of their figures are positive")

    def piece_bytes_per_s(self, piece_bytes: int) -> float:
        """Speed to expect of pieces of this size; between sizes a line on logarithmic scales, flat beyond."""
        return interpolate({point.piece_bytes: point.bytes_per_s for point in self.pieces}, piece_bytes)


@frozen(kw_only=True)
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
    memory_speed: MemorySpeed | None = None
    profile: DeviceProfile | None = None
    processor: str = ""  # its model, as the kernel names it; empty: not known

    @property
    def id(self) -> str:
        """Sixteen hexadecimal digits that name the hardware, whatever this process may use of it."""
        cores = [(core.id, core.capacity, core.kind) for core in self.cores]
        return _digits([self.architecture, self.instruction_set, self.processor, self.page_bytes, cores])

    @property
    def former_id(self) -> str:
        """The id up to cache version 5, which had limits and rights in it: kept profiles are still found by it."""
        memory = round(self.memory_total_bytes / MEMORY_ROUNDING_BYTES)
        cores = [dataclasses.astuple(core) for core in self.cores]
        rights = [self.cpu_quota, memory, self.page_bytes, self.io_uring]
        return _digits([self.architecture, self.instruction_set, cores, rights])

    @property
    def flash_engine(self) -> str:
        """The reader's engine to plan with: "io_uring" or "threads"."""
        return "io_uring" if self.io_uring else "threads"


def _digits(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
