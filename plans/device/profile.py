"""The device profile: what `neuronpipe profile device` has measured, as plain data, and what can be read from it.

Every figure is the median of some repetitions with their spread. Between what was measured the methods draw lines on
logarithmic scales, and beyond it they stay flat. README.md says how each figure is measured.
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

VERSION = 5
MAX_PROFILE_BYTES = 16 << 20
MAX_POINTS = 2048  # of one list: pages and pictures have as many rows and columns
MAX_TIME_S = 1 << 36  # since 1970: the year 4147
MAX_WORKERS = 4096
LIMITS = {"per_s": (1.0, 1e14), "us": (1e-3, 1e9), "share": (1e-6, MAX_SHARE), "factor": (1e-3, 1e3)}
"""What a figure can be, by how its name ends: less and more were never measured."""


@frozen(kw_only=True)
class FlashProfile:
    """How the package's storage is read; not `direct`: without direct I/O, so that the page cache answered."""

    engine: str
    direct: bool
    file_bytes: int
    reads: tuple[FlashRead, ...]
    costs: tuple[ReadCost, ...]

    def __post_init__(self) -> None:
        require_positive(self, "file_bytes")
        whole = [read for read in self.reads if read.range_bytes == self.file_bytes]
        if not any(read.core is None and not read.sequential for read in whole):
            raise ValueError("reads: there are no random ones of the whole file, issued from anywhere")

    def bytes_per_s(
        self, size_bytes: int, depth: int, range_bytes: int, *, sequential: bool = False, core: Kind | None = None
    ) -> float:
        """Speed to expect. Of a core class that was not measured so: of any."""
        for found in (
            [read for read in self.reads if read.core == core and read.sequential == sequential],
            [read for read in self.reads if read.core is None and read.sequential == sequential],
            [read for read in self.reads if read.core is None],
        ):
            if found:
                break
        measured = {(r.range_bytes, r.depth, r.request_bytes): r.bytes_per_s.median for r in found}
        return interpolate_all(measured.items(), (range_bytes, depth, size_bytes))

    def read_cpu_us(self, size_bytes: int, at_once: float) -> float:
        """Processor time of one of so many reads that are asked for together; by size on a straight line between the
        sizes measured, and beyond them."""
        by_number: dict[float, float] = {cost.at_once: self._by_size(cost.at_once, size_bytes) for cost in self.costs}
        return interpolate(by_number, at_once) if by_number else 0.0

    def _by_size(self, at_once: int, size_bytes: int) -> float:
        line = sorted((cost.request_bytes, cost.cpu_us.median) for cost in self.costs if cost.at_once == at_once)
        if len(line) < 2:
            return line[0][1]
        upper = next((n for n in range(1, len(line) - 1) if line[n][0] >= size_bytes), len(line) - 1)
        (x0, y0), (x1, y1) = line[upper - 1], line[upper]
        return max(min(y0, y1) / 2, y0 + (y1 - y0) * (size_bytes - x0) / (x1 - x0))

    @property
    def cpu_us_per_kib(self) -> float:
        """What a KiB more costs, between the smallest and the largest read measured."""
        most = max((cost.at_once for cost in self.costs), default=0)
        line = sorted((cost.request_bytes, cost.cpu_us.median) for cost in self.costs if cost.at_once == most)
        return (line[-1][1] - line[0][1]) / (line[-1][0] - line[0][0]) * 1024 if len(line) > 1 else 0.0


@frozen(kw_only=True)
class DeviceProfile:
    """One device, and one file system of it. dram, decode ... are in no order; None and () where nothing could be
    measured. accelerator: of a profile that was made before there were any, or where none was found, None."""

    version: int
    device_id: str
    architecture: str
    instruction_set: str
    taken_at: float  # seconds since 1970
    busy: float  # share of the machine that other programs had meanwhile
    cores: tuple[CoreClass, ...]
    decode_workers: int  # most that were measured
    arena_bytes: int  # of memory that was computed on
    cache_bytes: int  # of the processor's largest cache; 0: not known
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
            raise ValueError("arena_bytes and cache_bytes are not below zero")
        for name in ("cores", "barriers", "messages"):
            if not getattr(self, name):
                raise ValueError(f"{name}: is empty")

    @property
    def spread(self) -> float:
        """The typical spread of all figures of the machine itself."""
        alone = dataclasses.replace(self, accelerator=None)
        return statistics.median(figure.spread for _, figure in alone.figures())

    def figures(self) -> Iterator[tuple[tuple[object, ...], Figure]]:
        """Every figure, under what it is of: the name of its list, then the values of its point."""
        for name, points in self._lists().items():
            device = self._whose(name)
            for point in points:
                values = {field.name: getattr(point, field.name) for field in dataclasses.fields(point)}
                plain = tuple((key, value) for key, value in values.items() if not isinstance(value, Figure))
                for key, value in values.items():
                    if isinstance(value, Figure):
                        yield (name, *device, *plain, key), value

    def _whose(self, name: str) -> tuple[tuple[str, str], ...]:
        """Figures of another accelerator are other figures."""
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
        """Of all workers together. Raises KeyError where there was too little memory to measure."""
        if not self.dram:
            raise KeyError("dram: not in this profile")
        measured = (((point.workers, point.piece_bytes), point.bytes_per_s.median) for point in self.dram)
        return self._remembered(("dram",), measured, (workers, piece_bytes))

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
        """Of all workers together; `core`: of one worker on a core of that class. Raises KeyError for what was not
        measured at all."""
        measured = (
            ((point.workers, point.row_weights, point.share), point.bytes_per_s.median)
            for point in self._placed(self.decode, core)
            if (point.kind, point.quantization) == (kind, quantization)
        )
        return self._remembered((kind, quantization, core), measured, (workers, row_weights, share))

    def panel_token_weights_per_s(
        self,
        tokens: int,
        workers: int,
        *,
        quantization: Quantization = "q4",
        row_weights: int = 4096,
        core: Kind | None = None,
    ) -> float:
        """Tokens x weights a second of prefill's triggers. Raises KeyError for what was not measured at all."""
        measured = (
            ((point.workers, point.row_weights, point.tokens), point.token_weights_per_s.median)
            for point in self._placed(self.panels, core)
            if point.quantization == quantization
        )
        return self._remembered(("panel", quantization, core), measured, (workers, row_weights, tokens))

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
        """Tokens x weights a second of prefill's value rows. Raises KeyError for what was not measured at all."""
        measured = (
            ((point.workers, point.row_weights, point.share), point.token_weights_per_s.median)
            for point in self._placed(self.reused, core)
            if (point.kind, point.quantization) == (kind, quantization)
        )
        return self._remembered(("reused", kind, quantization, core), measured, (workers, row_weights, share))

    def values_bytes_per_s(
        self,
        workers: int,
        share: float,
        *,
        predicted: bool = False,
        quantization: Quantization = "q4",
        row_weights: int = 4096,
        core: Kind | None = None,
    ) -> float:
        """Up and Down rows of the neurons that fired, one after the other: that Up's turn fetches Down's row as well
        makes either figure by itself say little."""
        kinds: tuple[DecodeKind, DecodeKind] = ("predicted_ups", "predicted_downs") if predicted else ("ups", "downs")
        up, down = (
            self.decode_bytes_per_s(kind, workers, share, quantization=quantization, row_weights=row_weights, core=core)
            for kind in kinds
        )
        return 2 / (1 / up + 1 / down)

    def read_cpu_us(self, size_bytes: int, at_once: float) -> float:
        """Processor time of one of so many flash reads asked for together; 0 where flash was not measured."""
        return self.flash.read_cpu_us(size_bytes, at_once) if self.flash else 0.0

    def read_delay_us(self, workers: int, *, together: bool) -> float:
        """What a read takes in a run beyond the flash's own time, named together with others or by itself. Raises
        KeyError where that was not measured."""
        found = {float(one.workers): one.us.median for one in self.read_delays if one.together == together}
        if not found:
            raise KeyError("read_delays: not in this profile")
        return interpolate(found, workers)

    def read_factor(self, workers: int) -> float:
        """How many times `read_cpu_us` a read takes in a run. Raises KeyError where that was not measured."""
        if not self.read_factors:
            raise KeyError("read_factors: not in this profile")
        return interpolate({point.workers: point.factor.median for point in self.read_factors}, workers)

    def barrier_us(self, workers: int) -> float:
        """One barrier of a step."""
        return interpolate({point.workers: point.us.median for point in self.barriers}, workers)

    def message_us(self, workers: int) -> float:
        """From sending a step to so many workers to the last one's answer."""
        return interpolate({point.workers: point.us.median for point in self.messages}, workers)

    def step_factor(self, mode: str, workers: int) -> float:
        """How much longer a step takes than its kernels do by themselves; a mode that was not measured computes as
        exact mode does. Raises KeyError where no step was measured."""
        return interpolate(
            {point.workers: point.step_us.median / point.kernels_us.median for point in self._steps(mode)}, workers
        )

    def between_us(self, mode: str, workers: int) -> float:
        """From the end of a step to the beginning of the next one: messages, sampling, what the coordinator does.
        Raises KeyError where no step was measured."""
        return interpolate({point.workers: point.between_us.median for point in self._steps(mode)}, workers)

    def _steps(self, mode: str) -> list[StepPoint]:
        found: StepMode = "predicted" if mode == "predicted" else "exact"
        points = [point for point in self.steps if point.mode == found]
        if not points:
            raise KeyError(f"steps in mode {found}: not in this profile")
        return points

    def _remembered(
        self, what: tuple[object, ...], measured: Iterable[tuple[tuple[float, ...], float]], place: tuple[float, ...]
    ) -> float:
        """The figure between those measured, computed once: a search asks for the same ones thousands of times.
        Raises KeyError where nothing was measured."""
        if (what, place) not in self._known:
            points = list(measured)
            if not points:
                raise KeyError(f"{', '.join(str(word) for word in what if word)}: not in this profile")
            self._known[what, place] = interpolate_all(points, place)
        return self._known[what, place]

    @functools.cached_property
    def _known(self) -> dict[tuple[object, ...], float]:
        return {}

    def _placed(self, points: Sequence[Any], core: Kind | None) -> Iterator[Any]:
        """Of one worker on this class; or, for None, of any number: one on the fastest class, and all."""
        fastest = max(self.cores, key=lambda one: one.capacity).kind
        places = (None, fastest) if core is None else (core,)
        return (point for point in points if point.core in places)

    def flash_curve(self) -> FlashCurve | None:
        """What a brief probe measures of flash: random reads in the whole file."""
        flash = self.flash
        if flash is None:
            return None
        points = (
            FlashPoint(request_bytes=read.request_bytes, depth=read.depth, bytes_per_s=read.bytes_per_s.median)
            for read in flash.reads
            if read.core is None and not read.sequential and read.range_bytes == flash.file_bytes
        )
        return FlashCurve(
            engine=flash.engine, direct=flash.direct, points=tuple(points), spread=self.spread, busy=self.busy
        )

    def memory_speed(self) -> MemorySpeed | None:
        """What a brief probe measures of memory."""
        pieces = sorted({point.piece_bytes for point in self.dram} - {SEQUENTIAL_PIECE_BYTES})
        if not pieces:
            return None
        all_of_them = self.decode_workers
        return MemorySpeed(
            threads=all_of_them,
            one_thread_bytes_per_s=self.dram_bytes_per_s(1),
            sequential_bytes_per_s=self.dram_bytes_per_s(all_of_them),
            pieces=tuple(
                PiecePoint(piece_bytes=size, bytes_per_s=self.dram_bytes_per_s(all_of_them, size)) for size in pieces
            ),
            spread=self.spread,
            busy=self.busy,
        )

    def check(self, device_id: str, where: str) -> None:
        """Raises UserError when this is another device's."""
        if self.device_id != device_id:
            raise UserError(
                f"{where}: field 'device_id': {quoted(self.device_id)} is another device; "
                f"this one is {quoted(device_id)}: measure it with `neuronpipe profile device`"
            )

    def to_json(self) -> str:
        """The text of a profile file: a line for each point."""
        return _lines(dataclasses.asdict(self), "") + "\n"


def _refuse_points(name: str, points: Sequence[Any]) -> None:
    """Raises ValueError for a point that is there twice, and for a figure that no machine has."""
    seen = set()
    for number, point in enumerate(points):
        values = {field.name: getattr(point, field.name) for field in dataclasses.fields(point)}
        what = tuple(value for value in values.values() if not isinstance(value, Figure))
        if what in seen:
            raise ValueError(f"{name}[{number}]: this point is there twice")
        seen.add(what)
        for key, value in values.items():
            if not isinstance(value, Figure):
                continue
            least, most = next(limits for ending, limits in LIMITS.items() if key.endswith(ending))
            if not least <= value.median <= most:
                raise ValueError(f"{name}[{number}].{key}: a median of {value.median:g} is outside {least:g}..{most:g}")


def _lines(value: Any, indent: str) -> str:
    """JSON that a person can read: an object in a list is one line."""
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
    """The profile in a file's bytes. Raises UserError naming the field."""
    values = json_object(data, where)
    if values.get("version") != VERSION:
        found = quoted(values["version"]) if "version" in values else "missing"
        raise UserError(
            f"{where}: field 'version': {found}, but this program reads {VERSION}; "
            "measure again with `neuronpipe profile device`"
        )
    return from_json(DeviceProfile, values, where)


def read_profile(path: Path) -> DeviceProfile:
    """Read a profile file. Raises UserError."""
    return parse_profile(read_file(path, MAX_PROFILE_BYTES), str(path))
