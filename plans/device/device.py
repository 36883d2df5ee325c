"""A device as a plan sees it: hardware, limits and measured speeds.

The id covers the hardware only. It excludes limits (memory, processor time, allowed cores, io_uring), since the same
machine inside a container is the same device; planning applies the limits. It excludes measured speeds, since they
differ a little every time.
"""

from __future__ import annotations

import functools
import hashlib
import json
from typing import TYPE_CHECKING, Literal

from neuronpipe.plans.device.cores import Core
from neuronpipe.plans.device.measured_figures import interpolate, interpolate_all
from neuronpipe.protocol.frozen import frozen

if TYPE_CHECKING:
    from neuronpipe.plans.device.profile import DeviceProfile
    from neuronpipe.plans.device.storage import Storage


FlashEngine = Literal["io_uring", "threads"]


@frozen(kw_only=True)
class FlashPoint:
    """Speed of random reads of `request_bytes` each, with `depth` in flight."""

    request_bytes: int
    depth: int
    bytes_per_s: float


@frozen(kw_only=True)
class FlashCurve:
    """Measured read speeds of the storage that a package lies on.

    engine: "io_uring" or "threads"
    direct: False if the file system has no direct I/O, so that the page cache answered
    """

    engine: str
    direct: bool
    points: tuple[FlashPoint, ...]
    spread: float = 0.0  # of the least steady point: median distance of repetitions from their median, relative to it
    busy: float = 0.0  # share of the machine that other programs used during the measurement

    def __post_init__(self) -> None:
        if not self.points or any(p.request_bytes < 1 or p.depth < 1 or p.bytes_per_s <= 0 for p in self.points):
            raise ValueError("a flash curve needs points, and all of its figures must be positive")

    def bytes_per_s(self, request_bytes: int, depth: float) -> float:
        """Return the expected speed, interpolated on logarithmic scales and constant beyond the measured range."""
        key = request_bytes, depth
        if key not in self._cached_speeds:  # a search looks up the same speeds thousands of times
            points = (((point.depth, point.request_bytes), point.bytes_per_s) for point in self.points)
            self._cached_speeds[key] = interpolate_all(points, (depth, request_bytes))
        return self._cached_speeds[key]

    @functools.cached_property
    def _cached_speeds(self) -> dict[tuple[int, float], float]:
        return {}


@frozen(kw_only=True)
class PiecePoint:
    """Speed of reading pieces of `piece_bytes` with gaps between them, by all decode cores together.

    Bytes of gaps do not count.
    """

    piece_bytes: int
    bytes_per_s: float


@frozen(kw_only=True)
class MemorySpeed:
    """Speeds of reading memory: sequentially by one thread and by `threads` threads, and in pieces by `threads`."""

    threads: int
    one_thread_bytes_per_s: float
    sequential_bytes_per_s: float
    pieces: tuple[PiecePoint, ...]
    spread: float = 0.0  # `DeviceProfile.spread` of the profile that the speeds are from
    busy: float = 0.0  # share of the machine that other programs used during the measurement

    def __post_init__(self) -> None:
        figures = [self.threads, self.one_thread_bytes_per_s, self.sequential_bytes_per_s]
        figures += [figure for point in self.pieces for figure in (point.piece_bytes, point.bytes_per_s)]
        if not self.pieces or min(figures) <= 0:
            raise ValueError("memory speeds need pieces, and all of their figures must be positive")

    def piece_bytes_per_s(self, piece_bytes: int) -> float:
        """Return the expected speed for pieces of this size.

        It is interpolated on logarithmic scales, and constant beyond the measured range.
        """
        return interpolate({point.piece_bytes: point.bytes_per_s for point in self.pieces}, piece_bytes)


DESCRIBED = "described"  # the architecture of a device that a file describes: its facts are no measurements


@frozen(kw_only=True)
class Device:
    """One machine as this process may use it. A limit is None if there is none, a measurement if there was none."""

    architecture: str  # as uname names it; or DESCRIBED
    instruction_set: str  # of the kernels in use, e.g. "avx512"
    cores: tuple[Core, ...]
    cpu_quota: float | None  # processor time that the process may use, in cores
    memory_total_bytes: int
    memory_available_bytes: int
    page_bytes: int
    memlock_bytes: int | None
    io_uring: bool  # this process may use it
    flash: FlashCurve | None
    memory_speed: MemorySpeed | None = None
    profile: DeviceProfile | None = None
    processor: str = ""  # model name from the kernel; empty if unknown
    storage: Storage | None = None  # of the package; None without one

    @property
    def id(self) -> str:
        """Sixteen hexadecimal digits that identify the hardware, independent of this process's limits."""
        cores = [(core.id, core.capacity, core.kind) for core in self.cores]
        facts = [self.architecture, self.instruction_set, self.processor, self.page_bytes, cores]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    @property
    def flash_engine(self) -> FlashEngine:
        """The engine of the flash reader to plan with."""
        return "io_uring" if self.io_uring else "threads"
