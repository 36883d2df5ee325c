"""The device profile: the measurements of `neuronpipe profile device` as plain data, and queries on them.

Every figure is the median of several repetitions, with their spread. Unless stated otherwise, queries interpolate on
logarithmic scales and are constant beyond the measured range. The modules of plans/measure describe the measurements.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from neuronpipe.plans.device.accelerator import AcceleratorProfile
from neuronpipe.plans.device.cores import Kind
from neuronpipe.plans.device.device import FlashCurve, FlashPoint, MemorySpeed, PiecePoint
from neuronpipe.plans.device.measured_figures import Figure, interpolate, interpolate_all
from neuronpipe.plans.device.measured_points import (
    MAX_SHARE,
    SEQUENTIAL_PIECE_BYTES,
    CoreClass,
    DecodeKind,
    DecodePoint,
    DramPoint,
    FlashRead,
    PanelPoint,
    ReadCost,
    ReadDelay,
    ReadFactor,
    ReusedKind,
    ReusedPoint,
    Sharing,
    StepMode,
    StepPoint,
    Wait,
    require_positive,
)
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.strict_json import read_file
from neuronpipe.protocol.errors import UserError, quoted
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.schema import from_json, json_object

VERSION = 9  # profiles before have no attention
MAX_PROFILE_BYTES = 16 << 20
MAX_POINTS = 2048  # of one list: reports have a row or a column for each
MAX_TIME_S = 1 << 36  # since 1970: the year 4147
MAX_WORKERS = 4096
LIMITS = {"per_s": (1.0, 1e14), "us": (1e-3, 1e9), "share": (1e-6, MAX_SHARE), "factor": (1e-3, 1e3)}
"""Plausible range of a median, by the ending of the figure's name."""


@frozen(kw_only=True)
class FlashProfile:
    """Measured speeds of the storage that a package lies on, and the processor time of reads.

    engine: "io_uring" or "threads"
    direct: False if the file system has no direct I/O, so that the page cache answered
    file_bytes: size of the file that was read
    """

    engine: str
    direct: bool
    file_bytes: int
    reads: tuple[FlashRead, ...]
    costs: tuple[ReadCost, ...]

    def __post_init__(self) -> None:
        require_positive(self, "file_bytes")
        whole = [read for read in self.reads if read.range_bytes == self.file_bytes]
        if not any(read.core is None and not read.sequential for read in whole):
            raise ValueError("reads: needs random reads of the whole file by an unpinned process")

    def bytes_per_s(
        self, size_bytes: int, depth: int, range_bytes: int, *, sequential: bool = False, core: Kind | None = None
    ) -> float:
        """Return the expected speed of reads within the first `range_bytes` of a file. If a core of this class was not
        measured, unpinned reads stand in (None), and for sequential reads random ones."""
        for reads in (
            [read for read in self.reads if read.core == core and read.sequential == sequential],
            [read for read in self.reads if read.core is None and read.sequential == sequential],
            [read for read in self.reads if read.core is None],
        ):
            if reads:
                break
        measured = {(r.range_bytes, r.depth, r.request_bytes): r.bytes_per_s.median for r in reads}
        return interpolate_all(measured.items(), (range_bytes, depth, size_bytes))

    def read_cpu_us(self, size_bytes: int, at_once: float) -> float:
        """Return the processor time of one of `at_once` reads requested together; 0 if it was not measured. It is
        interpolated linearly over the size, also beyond the measured sizes."""
        by_count: dict[float, float] = {cost.at_once: self._by_size(cost.at_once, size_bytes) for cost in self.costs}
        return interpolate(by_count, at_once) if by_count else 0.0

    def _by_size(self, at_once: int, size_bytes: int) -> float:
        line = sorted((cost.request_bytes, cost.cpu_us.median) for cost in self.costs if cost.at_once == at_once)
        if len(line) < 2:
            return line[0][1]
        upper = next((n for n in range(1, len(line) - 1) if line[n][0] >= size_bytes), len(line) - 1)
        (x0, y0), (x1, y1) = line[upper - 1], line[upper]
        return max(min(y0, y1) / 2, y0 + (y1 - y0) * (size_bytes - x0) / (x1 - x0))

    @property
    def cpu_us_per_kib(self) -> float:
        """Return the additional processor time for each KiB of a read, over the measured sizes; 0 if unknown."""
        max_at_once = max((cost.at_once for cost in self.costs), default=0)
        line = sorted((cost.request_bytes, cost.cpu_us.median) for cost in self.costs if cost.at_once == max_at_once)
        return (line[-1][1] - line[0][1]) / (line[-1][0] - line[0][0]) * 1024 if len(line) > 1 else 0.0


@frozen(kw_only=True)
class DeviceProfile:
    """Measurements of one device and of one of its file systems. The points of a list have no order. None and () mean
    that nothing was measured."""

    version: int
    device_id: str
    architecture: str
    instruction_set: str
    taken_at: float  # seconds since 1970
    busy: float  # share of the machine that other programs used during the measurement
    cores: tuple[CoreClass, ...]
    decode_workers: int  # maximum of workers that measured together
    arena_bytes: int  # size of the memory on which kernels were measured
    cache_bytes: int  # size of the processor's largest cache; 0 if unknown
    dram: tuple[DramPoint, ...]
    decode: tuple[DecodePoint, ...]
    panels: tuple[PanelPoint, ...]
    reused: tuple[ReusedPoint, ...]
    flash: FlashProfile | None
    sharing: tuple[Sharing, ...]
    barriers: tuple[Wait, ...]
    messages: tuple[Wait, ...]
    steps: tuple[StepPoint, ...]
    read_delays: tuple[ReadDelay, ...]
    read_factors: tuple[ReadFactor, ...]
    accelerator: AcceleratorProfile | None = None

    def __post_init__(self) -> None:
        require_positive(self, "decode_workers")
        if not 0 < self.taken_at <= MAX_TIME_S:
            raise ValueError(f"taken_at {self.taken_at!r} is outside 0..{MAX_TIME_S}")
        for name, points in self._lists().items():
            if len(points) > MAX_POINTS:
                raise ValueError(f"{name}: {len(points)} points, {MAX_POINTS} at most")
            _refuse_points(name, points)
        if self.decode_workers > MAX_WORKERS:
            raise ValueError(f"decode_workers {self.decode_workers}: {MAX_WORKERS} at most")
        if not 0 <= self.busy <= 1:
            raise ValueError(f"busy {self.busy!r} is outside 0..1")
        if self.cache_bytes < 0 or self.arena_bytes < 0:
            raise ValueError("arena_bytes and cache_bytes must not be negative")
        for name in ("cores", "barriers", "messages"):
            if not getattr(self, name):
                raise ValueError(f"{name}: is empty")

    @property
    def spread(self) -> float:
        """Return the median spread of all figures except those of an accelerator."""
        without_accelerator = dataclasses.replace(self, accelerator=None)
        return statistics.median(figure.spread for _, figure in without_accelerator.figures())

    def figures(self) -> Iterator[tuple[tuple[object, ...], Figure]]:
        """Yield (key, figure) for every figure. A key has the name of the list, the accelerator's name if the figure is
        of one, (field, value) for each other field of the point, and the figure's field."""
        for name, points in self._lists().items():
            accelerator = self._accelerator_key(name)
            for point in points:
                values = {field.name: getattr(point, field.name) for field in dataclasses.fields(point)}
                plain = tuple((key, value) for key, value in values.items() if not isinstance(value, Figure))
                for key, value in values.items():
                    if isinstance(value, Figure):
                        yield (name, *accelerator, *plain, key), value

    def _accelerator_key(self, name: str) -> tuple[tuple[str, str], ...]:
        """Return the part of keys in list `name` that distinguishes accelerators."""
        if self.accelerator is None or not name.startswith("accelerator."):
            return ()
        return (("device", self.accelerator.name),)

    def _lists(self) -> dict[str, tuple[Any, ...]]:
        flash = self.flash
        return {
            "dram": self.dram,
            "decode": self.decode,
            "panels": self.panels,
            "reused": self.reused,
            "flash.reads": flash.reads if flash else (),
            "flash.costs": flash.costs if flash else (),
            "sharing": self.sharing,
            "barriers": self.barriers,
            "messages": self.messages,
            "steps": self.steps,
            "read_delays": self.read_delays,
            "read_factors": self.read_factors,
            **(self.accelerator.lists() if self.accelerator else {}),
        }

    def dram_bytes_per_s(self, workers: int, piece_bytes: int = SEQUENTIAL_PIECE_BYTES) -> float:
        """Return the speed at which all workers together read memory, in pieces of this size, or in order
        (SEQUENTIAL_PIECE_BYTES). Raises KeyError if it was not measured."""
        if not self.dram:
            raise KeyError("dram: not in this profile")
        measured = (((point.workers, point.piece_bytes), point.bytes_per_s.median) for point in self.dram)
        return self._interpolated(("dram",), measured, (workers, piece_bytes))

    def decode_bytes_per_s(
        self,
        kind: DecodeKind,
        workers: int,
        share: float = 1.0,
        *,
        quantization: Quantization = "q4",
        row_weights: int = 4096,
        core: Kind | None = None,
    ) -> float:
        """Return the speed of a decode kernel, of all workers together. Raises KeyError if it was not measured.

        share: share of the neurons whose rows are computed
        core: class of the core of a single worker; None: decode cores
        """
        measured = (
            ((point.workers, point.row_weights, point.share), point.bytes_per_s.median)
            for point in self._points_on(self.decode, core)
            if (point.kind, point.quantization) == (kind, quantization)
        )
        return self._interpolated((kind, quantization, core), measured, (workers, row_weights, share))

    def panel_token_weights_per_s(
        self,
        tokens: int,
        workers: int,
        *,
        quantization: Quantization = "q4",
        row_weights: int = 4096,
        core: Kind | None = None,
    ) -> float:
        """Return tokens x weights per second of prefill's products with triggers, of all workers together. Raises
        KeyError if it was not measured. `core` is as in `decode_bytes_per_s`."""
        measured = (
            ((point.workers, point.row_weights, point.tokens), point.token_weights_per_s.median)
            for point in self._points_on(self.panels, core)
            if point.quantization == quantization
        )
        return self._interpolated(("panel", quantization, core), measured, (workers, row_weights, tokens))

    def reused_token_weights_per_s(
        self,
        kind: ReusedKind,
        workers: int,
        share: float,
        *,
        quantization: Quantization = "q4",
        row_weights: int = 4096,
        core: Kind | None = None,
    ) -> float:
        """Return tokens x weights per second of prefill's products with value rows, of all workers together. Raises
        KeyError if it was not measured. `share` and `core` are as in `decode_bytes_per_s`."""
        measured = (
            ((point.workers, point.row_weights, point.share), point.token_weights_per_s.median)
            for point in self._points_on(self.reused, core)
            if (point.kind, point.quantization) == (kind, quantization)
        )
        return self._interpolated(("reused", kind, quantization, core), measured, (workers, row_weights, share))

    def read_cpu_us(self, size_bytes: int, at_once: float) -> float:
        """Return the processor time of one of `at_once` flash reads requested together; 0 if it was not measured."""
        return self.flash.read_cpu_us(size_bytes, at_once) if self.flash else 0.0

    def read_delay_us(self, workers: int, *, together: bool) -> float:
        """Return the time that a worker waits for a read beyond the flash's own time, if the read is requested together
        with others of its layer or by itself. Raises KeyError if unmeasured."""
        delays = {float(delay.workers): delay.us.median for delay in self.read_delays if delay.together == together}
        if not delays:
            raise KeyError("read_delays: not in this profile")
        return interpolate(delays, workers)

    def read_factor(self, workers: int) -> float:
        """Return the processor time of a read in a run, relative to `read_cpu_us`. Raises KeyError if unmeasured."""
        if not self.read_factors:
            raise KeyError("read_factors: not in this profile")
        return interpolate({point.workers: point.factor.median for point in self.read_factors}, workers)

    def barrier_us(self, workers: int) -> float:
        """Return the time of one barrier of this many workers."""
        return interpolate({point.workers: point.us.median for point in self.barriers}, workers)

    def message_us(self, workers: int) -> float:
        """Return the time from sending a step to this many workers until the last one has answered."""
        return interpolate({point.workers: point.us.median for point in self.messages}, workers)

    def step_factor(self, mode: str, workers: int) -> float:
        """Return the time of a step relative to its kernels. Thresholded mode counts as exact mode. Raises KeyError if
        no step of this mode was measured."""
        return interpolate(
            {point.workers: point.step_us.median / point.kernels_us.median for point in self._steps(mode)}, workers
        )

    def between_us(self, mode: str, workers: int) -> float:
        """Return the time from the end of a step to the start of the next. Modes and errors are as in `step_factor`."""
        return interpolate({point.workers: point.between_us.median for point in self._steps(mode)}, workers)

    def _steps(self, mode: str) -> list[StepPoint]:
        measured_mode: StepMode = "predicted" if mode == "predicted" else "exact"
        points = [point for point in self.steps if point.mode == measured_mode]
        if not points:
            raise KeyError(f"steps in mode {measured_mode}: not in this profile")
        return points

    def _interpolated(
        self, kind: tuple[object, ...], measured: Iterable[tuple[tuple[float, ...], float]], position: tuple[float, ...]
    ) -> float:
        """Return the interpolated value at `position`. Raises KeyError if nothing was measured. Results are cached by
        `kind` and position, since a search looks up the same ones thousands of times."""
        if (kind, position) not in self._interpolations:
            points = list(measured)
            if not points:
                raise KeyError(f"{', '.join(str(word) for word in kind if word)}: not in this profile")
            self._interpolations[kind, position] = interpolate_all(points, position)
        return self._interpolations[kind, position]

    @functools.cached_property
    def _interpolations(self) -> dict[tuple[object, ...], float]:
        return {}

    def _points_on(self, points: Sequence[Any], core: Kind | None) -> Iterator[Any]:
        """Yield the points of one worker on a core of this class. None: the points of all workers, and of one worker on
        the fastest class"""
        fastest = max(self.cores, key=lambda core_class: core_class.capacity).kind
        accepted = (None, fastest) if core is None else (core,)
        return (point for point in points if point.core in accepted)

    def flash_curve(self) -> FlashCurve | None:
        """Return the flash figures in the form of a brief measurement: random unpinned reads of the whole file. None if
        flash was not measured."""
        flash = self.flash
        if flash is None:
            return None
        points = (
            FlashPoint(request_bytes=read.request_bytes, depth=read.depth, bytes_per_s=read.bytes_per_s.median)
            for read in flash.reads
            if read.core is None and not read.sequential and read.range_bytes == flash.file_bytes
        )
        spread = statistics.median(read.bytes_per_s.spread for read in flash.reads)
        return FlashCurve(engine=flash.engine, direct=flash.direct, points=tuple(points), spread=spread, busy=self.busy)

    def memory_speed(self) -> MemorySpeed | None:
        """Return the memory figures of one worker and of all; None if memory was not measured."""
        pieces = sorted({point.piece_bytes for point in self.dram} - {SEQUENTIAL_PIECE_BYTES})
        if not pieces:
            return None
        workers = self.decode_workers
        return MemorySpeed(
            threads=workers,
            one_thread_bytes_per_s=self.dram_bytes_per_s(1),
            sequential_bytes_per_s=self.dram_bytes_per_s(workers),
            pieces=tuple(
                PiecePoint(piece_bytes=size, bytes_per_s=self.dram_bytes_per_s(workers, size)) for size in pieces
            ),
            spread=self.spread,
            busy=self.busy,
        )

    def check(self, device_id: str, where: str) -> None:
        """Raise UserError if this is the profile of another device."""
        if self.device_id != device_id:
            raise UserError(
                f"{where}: field 'device_id': {quoted(self.device_id)} is another device; "
                f"this one is {quoted(device_id)}: measure it with `neuronpipe profile device`"
            )

    def to_json(self) -> str:
        """Return the content of a profile file, with one line for each point."""
        return _lines(dataclasses.asdict(self), "") + "\n"


def _refuse_points(name: str, points: Sequence[Any]) -> None:
    """Raise ValueError for a duplicate point or an implausible figure."""
    known_keys = set()
    for number, point in enumerate(points):
        values = {field.name: getattr(point, field.name) for field in dataclasses.fields(point)}
        point_key = tuple(value for value in values.values() if not isinstance(value, Figure))
        if point_key in known_keys:
            raise ValueError(f"{name}[{number}]: duplicate point")
        known_keys.add(point_key)
        for key, value in values.items():
            if not isinstance(value, Figure):
                continue
            minimum, maximum = next(limits for ending, limits in LIMITS.items() if key.endswith(ending))
            if not minimum <= value.median <= maximum:
                raise ValueError(
                    f"{name}[{number}].{key}: a median of {value.median:g} is outside {minimum:g}..{maximum:g}"
                )


def _lines(value: Any, indent: str) -> str:
    """Return indented JSON with one line for each object in a list."""
    inner = indent + "  "
    if isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(inner + json.dumps(item) for item in value) + f"\n{indent}]"
    if isinstance(value, dict):
        return (
            "{\n"
            + ",\n".join(f'{inner}"{key}": {_lines(item, inner)}' for key, item in value.items())
            + f"\n{indent}}}"
        )
    return json.dumps(value)


def parse_profile(data: bytes, where: str) -> DeviceProfile:
    """Return the profile in `data`. Raises UserError, naming `where` and the field, if it is malformed or has another
    version."""
    values = json_object(data, where)
    if values.get("version") != VERSION:
        version = quoted(values["version"]) if "version" in values else "missing"
        raise UserError(
            f"{where}: field 'version': {version}, but this program reads {VERSION}; "
            "measure again with `neuronpipe profile device`"
        )
    return from_json(DeviceProfile, values, where)


def read_profile(path: Path) -> DeviceProfile:
    """Return the profile in a file. Raises UserError if it cannot be read, and as `parse_profile`."""
    return parse_profile(read_file(path, MAX_PROFILE_BYTES), str(path))
