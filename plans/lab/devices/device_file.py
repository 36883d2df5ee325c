"""Simulated devices: from files of values, each with its source, or from this machine's measurements.

Units are in the names; GB is 10^9 bytes, KiB 1024 bytes. A source that begins with "assumed" or "fitted" is no
measurement of the device.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from neuronpipe.plans.device.cores import Kind
from neuronpipe.plans.device.device import Device, FlashCurve
from neuronpipe.plans.device.measured_figures import interpolate
from neuronpipe.plans.package.activity_profile import interpolated
from neuronpipe.protocol.errors import UserError, quoted
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.schema import from_json, json_object

FOLDER = Path(__file__).parent
THIS_MACHINE = "this-machine"
MAX_FILE_BYTES = 1 << 20
MIN_VALUE, MAX_VALUE = 1e-6, 1e6  # beyond them, times would be infinite or 0
MAX_CORES = 1024
MAX_NAME_CHARACTERS = 100
LOADER_DEPTH = 32
POSSIBLE = f"{MIN_VALUE:g}..{MAX_VALUE:g}"
WITHOUT_NPU = ("npu_tflop_per_s", "npu_start_us", "dram_npu_gb_per_s")  # may be 0
Issuer = Literal["big", "mid", "little", "several"]


@frozen(kw_only=True)
class Sourced:
    """A value and its source."""

    value: float
    source: str


@frozen(kw_only=True)
class CoreClass:
    """A class of equal cores.

    reads_gb_per_s: speed of reading memory while other cores are idle
    computes_gb_per_s: speed of computing one token with weights in the cache, in bytes of weights
    """

    kind: Literal["big", "mid", "little"]
    count: int
    reads_gb_per_s: float
    computes_gb_per_s: float
    source: str


@frozen(kw_only=True)
class BlockSpeed:
    block_kib: float
    gb_per_s: float


@frozen(kw_only=True)
class Curve:
    """Speed of reads by their size. Linear on logarithmic scales between the points, constant beyond them."""

    points: tuple[BlockSpeed, ...]
    source: str

    def bytes_per_s(self, block_bytes: float) -> float:
        return interpolate({point.block_kib * 1024: point.gb_per_s * 1e9 for point in self.points}, block_bytes)


@frozen(kw_only=True)
class RangeShare:
    range_mib: float
    share: float


@frozen(kw_only=True)
class Ranges:
    """Speed of small random reads that are spread over a range, as a share of their speed within a small range."""

    points: tuple[RangeShare, ...]
    source: str

    def share(self, range_bytes: float) -> float:
        line = tuple((math.log(point.range_mib * 2**20), point.share) for point in self.points)
        return interpolated(line, math.log(max(1.0, range_bytes)))


@frozen(kw_only=True)
class Issuers:
    """Speed of small random reads by the class of the core that issues them, relative to a mid core.

    several: reads are issued by several cores
    """

    big: float
    mid: float
    little: float
    several: float
    source: str


@frozen(kw_only=True)
class DeviceModel:
    """A simulated device. Fields about an NPU are 0 if it has none.

    cores: the fastest first
    """

    name: str
    memory_usable_gb: Sourced
    cores: tuple[CoreClass, ...]
    dram_cpu_gb_per_s: Sourced
    dram_npu_gb_per_s: Sourced
    dram_total_gb_per_s: Sourced
    npu_tflop_per_s: Sourced
    npu_start_us: Sourced
    copy_gb_per_s: Sourced
    barrier_us: Sourced
    message_us: Sourced
    lookup_ns: Sourced
    flash_sequential: Curve
    flash_random: Curve
    flash_ranges: Ranges
    flash_issuers: Issuers

    @property
    def has_npu(self) -> bool:
        return self.npu_tflop_per_s.value > 0

    @property
    def fast_cores(self) -> list[CoreClass]:
        """The class of each core that computes, in the order of `cores`. Little cores compute only if all are
        little."""
        each = [core for core in self.cores for _ in range(core.count)]
        return [core for core in each if core.kind != "little"] or each

    def random_bytes_per_s(self, read_bytes: float, range_bytes: float, issuer: Issuer) -> float:
        """Return the speed of random reads in bytes per second, with many reads in flight.

        `flash_random` has the speed for the size. Range and issuer add to each read the time by which they slow down a
        read of the smallest size, so that large reads are hardly slower.

        read_bytes: size of a read
        range_bytes: size of the part of the file over which reads are spread
        issuer: class of the core that issues the reads, or several cores
        """
        speed = self.flash_random.bytes_per_s(read_bytes)
        slower = self.flash_ranges.share(range_bytes) * float(getattr(self.flash_issuers, issuer))
        per_read_s = self._per_read_s() * (1 / slower - 1)
        return read_bytes / (read_bytes / speed + per_read_s)

    def sequential_bytes_per_s(self, block_bytes: float = 512 << 10) -> float:
        return self.flash_sequential.bytes_per_s(block_bytes)

    def _per_read_s(self) -> float:
        """Return the time of a read of the smallest size, which hardly depends on the bytes."""
        smallest = min(self.flash_random.points, key=lambda point: point.block_kib)
        return smallest.block_kib * 1024 / (smallest.gb_per_s * 1e9)

    def sources(self) -> Iterator[tuple[str, str, str]]:
        """Yield (field, value as text, source) of all values."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Sourced):
                yield field.name, f"{value.value:g}", value.source
            elif field.name == "cores":
                for core in value:
                    figures = f"{core.count}: {core.reads_gb_per_s:g} / {core.computes_gb_per_s:g} GB/s"
                    yield f"cores.{core.kind}", figures, core.source
            elif field.name != "name":
                yield field.name, _figures_text(value), value.source


def _figures_text(value: Curve | Ranges | Issuers) -> str:
    if isinstance(value, Curve):
        return ", ".join(f"{point.block_kib:g} KiB: {point.gb_per_s:g} GB/s" for point in value.points)
    if isinstance(value, Ranges):
        return ", ".join(f"{point.range_mib:g} MiB: {point.share:g}" for point in value.points)
    return f"big {value.big:g}, mid {value.mid:g}, little {value.little:g}, several {value.several:g}"


def known_devices() -> list[str]:
    """Return the names of the devices that `read_device` takes. Verbs take THIS_MACHINE too, which has no file."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def read_device(name: str) -> DeviceModel:
    """Return a device that comes with the program, or that in a file. Raises UserError, which names file and field."""
    file = FOLDER / f"{name}.json"
    if not file.is_file():
        file = Path(name)
    if not file.is_file():
        names = ", ".join([*known_devices(), THIS_MACHINE])
        raise UserError(f"{quoted(name)}: is no device; known are {names}, or name a file")
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as wrong:
        raise UserError(f"{file}: cannot be read ({wrong.strerror})") from wrong
    if len(data) > MAX_FILE_BYTES:
        raise UserError(f"{file}: larger than {MAX_FILE_BYTES >> 20} MiB, which no device file is")
    planner_device = json_object(data, str(file))
    if "device_id" in planner_device and "name" not in planner_device:
        raise UserError(
            f"{file}: is a profile, which `neuronpipe profile device` measured of one machine: plan and simulate there "
            f"with {THIS_MACHINE}, or describe the device in a file like {FOLDER / 'oneplus-12.json'}"
        )
    return checked(from_json(DeviceModel, planner_device, str(file)), str(file))


def checked(device: DeviceModel, where: str) -> DeviceModel:
    """Return the device. Raises UserError, which starts with `where` and names the field, if a value is impossible."""

    def require(field: str, holds: bool, complaint: str) -> None:
        if not holds:
            raise UserError(f"{where}: field '{field}': {complaint}")

    name_fits = len(device.name.strip()) > 0 and len(device.name) <= MAX_NAME_CHARACTERS and device.name.isprintable()
    require("name", name_fits, f"expected 1 to {MAX_NAME_CHARACTERS} characters that can be printed")
    for field, value in ((field.name, getattr(device, field.name)) for field in dataclasses.fields(device)):
        if isinstance(value, Sourced):
            is_without_npu = value.value == 0 and field in WITHOUT_NPU
            require(field, is_without_npu or _is_possible(value.value), f"{value.value:g} is outside {POSSIBLE}")
            require(field, bool(value.source.strip()), "has no source; write where it comes from, or assumed")
    require("cores", 1 <= sum(core.count for core in device.cores) <= MAX_CORES, f"there are 1 to {MAX_CORES} cores")
    for n, core in enumerate(device.cores):
        for name in ("count", "reads_gb_per_s", "computes_gb_per_s"):
            value = getattr(core, name)
            require(f"cores[{n}].{name}", _is_possible(value), f"{value:g} is outside {POSSIBLE}")
    for name in ("flash_sequential", "flash_random"):
        line = [(point.block_kib, point.gb_per_s) for point in getattr(device, name).points]
        require(name, _rising(line), f"needs points, with larger blocks later and all figures within {POSSIBLE}")
    line = [(point.range_mib, point.share) for point in device.flash_ranges.points]
    shares = all(share <= 1 for _, share in line)
    require("flash_ranges", _rising(line) and shares, "needs points, with larger ranges later and shares from 0 to 1")
    for name in ("big", "mid", "little", "several"):
        share = getattr(device.flash_issuers, name)
        require(f"flash_issuers.{name}", MIN_VALUE <= share <= 10, f"{share:g} is outside {MIN_VALUE:g}..10")
    cpu, npu, total = device.dram_cpu_gb_per_s.value, device.dram_npu_gb_per_s.value, device.dram_total_gb_per_s.value
    require("dram_total_gb_per_s", total >= max(cpu, npu), f"{total:g} is less than one unit reads alone")
    require("dram_npu_gb_per_s", not device.has_npu or npu > 0, "an NPU reads memory")
    return device


def _rising(line: Sequence[tuple[float, float]]) -> bool:
    rising = all(a < b for (a, _), (b, _) in itertools.pairwise(line))
    return bool(line) and rising and all(map(_is_possible, itertools.chain(*line)))


def _is_possible(value: float) -> bool:
    return MIN_VALUE <= value <= MAX_VALUE


def this_machine(device: Device) -> DeviceModel:
    """Return this machine as a device to simulate, from stored measurements. Raises UserError if flash or memory were
    not measured."""
    if device.flash is None or device.memory_speed is None:
        raise UserError(
            f"{THIS_MACHINE}: flash and memory were not measured; run `neuronpipe doctor PACKAGE` with a package"
        )
    measured, assumed, profile = "measured, kept profile", "assumed", device.profile
    workers = device.memory_speed.threads
    one_thread_gb_per_s = device.memory_speed.one_thread_bytes_per_s / 1e9
    all_threads_gb_per_s = max(one_thread_gb_per_s, device.memory_speed.sequential_bytes_per_s / 1e9)
    curve = Curve(points=tuple(_deep_points(device.flash)), source=measured)
    return checked(
        DeviceModel(
            name="this machine",
            memory_usable_gb=Sourced(value=device.memory_total_bytes / 1e9, source=measured),
            cores=tuple(_core_classes(device, one_thread_gb_per_s)),
            dram_cpu_gb_per_s=Sourced(value=all_threads_gb_per_s, source=measured),
            dram_npu_gb_per_s=Sourced(value=0, source="no NPU"),
            dram_total_gb_per_s=Sourced(value=all_threads_gb_per_s, source=measured),
            npu_tflop_per_s=Sourced(value=0, source="no NPU"),
            npu_start_us=Sourced(value=0, source="no NPU"),
            copy_gb_per_s=Sourced(value=one_thread_gb_per_s / 2, source=f"{assumed}: half of what one thread reads"),
            barrier_us=Sourced(value=profile.barrier_us(workers), source=measured)
            if profile is not None
            else Sourced(value=10, source=assumed),
            message_us=Sourced(value=profile.message_us(workers), source=measured)
            if profile is not None
            else Sourced(value=190, source=assumed),
            lookup_ns=Sourced(value=100, source=assumed),
            flash_sequential=curve,
            flash_random=curve,
            flash_ranges=Ranges(points=(RangeShare(range_mib=1, share=1.0),), source=f"{assumed}: no effect"),
            flash_issuers=Issuers(big=1, mid=1, little=1, several=1, source=f"{assumed}: no effect"),
        ),
        THIS_MACHINE,
    )


def _core_classes(device: Device, reads_gb_per_s: float) -> Iterator[CoreClass]:
    kinds: list[Kind] = [core.kind for core in device.cores if core.allowed]
    every: tuple[Kind, ...] = ("big", "mid", "little")
    for kind in every:
        if kind in kinds:
            yield CoreClass(
                kind=kind,
                count=kinds.count(kind),
                reads_gb_per_s=reads_gb_per_s,
                computes_gb_per_s=reads_gb_per_s,
                source="measured: reading by one thread; computing assumed to keep up",
            )


def _deep_points(flash: FlashCurve) -> Iterator[BlockSpeed]:
    """Yield the speeds at the loader's queue depth, or at the largest measured depth if that is smaller."""
    depth = min(LOADER_DEPTH, max(point.depth for point in flash.points))
    for size in sorted({point.request_bytes for point in flash.points}):
        yield BlockSpeed(block_kib=size / 1024, gb_per_s=flash.bytes_per_s(size, depth) / 1e9)
