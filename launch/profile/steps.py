"""Decode steps of a run, measured for a device profile, which otherwise has the kernels alone.

All figures come from runs of a small synthetic package, which is larger than most caches:

all weights resident             step time, to compare with that of the kernels; time between steps
few rows missing, exact mode     delay of a read, which all workers wait for if a gate fires late in a layer
more missing, predicted mode     processor time of a read, relative to a loader without a run
all neurons offloaded            if an accelerator was measured: time of a layer beyond kernels, copies and calls
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from neuronpipe.launch.bench.cases import Case, Prompts
from neuronpipe.launch.bench.measure import Bench, wait_until_warm
from neuronpipe.launch.client import Client
from neuronpipe.launch.planning.accelerator import measured_accelerator
from neuronpipe.launch.progress import refreshing
from neuronpipe.launch.supervisor.start import started_run
from neuronpipe.plans.cost.activation_rates import rates
from neuronpipe.plans.cost.io_wait import IssueTime
from neuronpipe.plans.cost.token_time import decode_reads, expected
from neuronpipe.plans.device.accelerator import RunOverhead
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.device.measured_figures import MIN_FIGURE, Figure
from neuronpipe.plans.device.measured_points import ReadDelay, ReadFactor, StepMode, StepPoint
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.measure.probe import decode_cores
from neuronpipe.plans.models.spec import LayerKind
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import ACCELERATOR, Expected, Plan
from neuronpipe.plans.plan.offloaded_blocks import Accelerator, offload_scratch_bytes, offloaded_weights_bytes
from neuronpipe.plans.planner.device_facts import device_facts
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.planner import make_plan
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.links import CONTROL

LAYERS = 8
TOKENS = 48
REPETITIONS = 3
CONTEXT_TOKENS = 256
READS_TOKENS: dict[StepMode, int] = {"exact": TOKENS, "predicted": 128}
"""Tokens per repetition for figures of reads. The first ones miss most, in bursts that later tokens do not have."""
RESIDENT: dict[StepMode, float] = {"exact": 0.85, "predicted": 0.6}
"""Resident share of the feed-forward for figures of reads."""
MIN_US = 0.1  # replaces differences at or below zero, since a profile's figures are above zero
MODES: tuple[StepMode, ...] = ("exact", "predicted")
LOADING = ("loader", "cache")  # roles that use processor time for reads
NEEDED_BYTES = 1 << 30  # available memory; the run uses half of it


def with_steps(profile: DeviceProfile, device: Device, progress: Callable[[], None]) -> DeviceProfile:
    """Return the profile with steps, read delays and the accelerator's overhead in runs.

    Steps are measured in both modes with all decode workers, and in exact mode with one. The profile is unchanged if
    memory is short, or if the profile has no speed of the memory.

    progress: called at most `steps_count(device, ...)` times
    """
    memory_speed = profile.memory_speed()
    if device.memory_available_bytes < NEEDED_BYTES or memory_speed is None:
        return profile
    cases = _cases(profile.decode_workers)
    without_overhead = kernels_alone(profile, cases)
    device = dataclasses.replace(
        device, profile=without_overhead, flash=profile.flash_curve(), memory_speed=memory_speed
    )
    with tempfile.TemporaryDirectory(prefix="neuronpipe-") as folder:
        with refreshing():
            package = _make_package(Path(folder) / "package")
        progress()
        steps = tuple(_measured(package, device, mode, workers, progress) for mode, workers in cases)
        profile = dataclasses.replace(profile, steps=steps)
        profile = _with_accelerator(profile, package, dataclasses.replace(device, profile=profile), progress)
        if device.flash is None:
            return profile
        return _with_reads(profile, package, dataclasses.replace(device, profile=profile), progress)


def kernels_alone(profile: DeviceProfile, cases: Sequence[tuple[StepMode, int]]) -> DeviceProfile:
    """Return the profile with steps that take no longer than their kernels.

    The plan of a measurement must not depend on the figures that it measures.
    """
    same = Figure(median=1.0, spread=0.0)
    steps = (
        StepPoint(mode=mode, workers=workers, kernels_us=same, step_us=same, between_us=same) for mode, workers in cases
    )
    return dataclasses.replace(profile, steps=tuple(steps))


def steps_count(device: Device, *, accelerator: bool = False) -> int:
    """Return the maximum number of measurements.

    accelerator: whether the profile has one
    """
    cases = _cases(len(decode_cores(device)))
    runs = len(cases) + sum(mode == "exact" for mode, _ in cases) + 1 + (len(MODES) if accelerator else 0)
    return 1 + runs * (1 + REPETITIONS)


def _cases(workers: int) -> tuple[tuple[StepMode, int], ...]:
    all_workers: tuple[tuple[StepMode, int], ...] = (("exact", workers), ("predicted", workers))
    return all_workers if workers == 1 else (("exact", 1), *all_workers)


def _make_package(target: Path) -> Package:
    from neuronpipe.plans.lab.synth.shapes import SHAPES
    from neuronpipe.plans.lab.synth.synthesize import synthesize  # these bring numpy

    model = dataclasses.replace(SHAPES["turbosparse-1b"], layer_kinds=(LayerKind(LAYERS),))
    return synthesize("steps", model, target)


def _with_accelerator(
    profile: DeviceProfile, package: Package, device: Device, progress: Callable[[], None]
) -> DeviceProfile:
    """Add the time of a layer in a run with all neurons offloaded, or as many as the device's memory holds."""
    accelerator = measured_accelerator(profile, None, package.manifest)
    if profile.accelerator is None or accelerator is None:
        return profile
    in_runs = tuple(_in_run(package, device, mode, *accelerator, progress) for mode in MODES)
    return dataclasses.replace(profile, accelerator=dataclasses.replace(profile.accelerator, in_runs=in_runs))


def _in_run(
    package: Package,
    device: Device,
    mode: StepMode,
    accelerator: Accelerator,
    backend: str,
    progress: Callable[[], None],
) -> RunOverhead:
    assert device.profile is not None
    manifest, blocks = package.manifest, package.manifest.layout.blocks
    limit_bytes = offloaded_weights_bytes(manifest, blocks) + offload_scratch_bytes(manifest, blocks, 1)
    facts = device_facts(
        dataclasses.replace(device, profile=dataclasses.replace(device.profile, accelerator=None)),  # so it gets all
        device.profile.decode_workers,
        backends={ACCELERATOR: backend},
        accelerator=dataclasses.replace(accelerator, limit_bytes=limit_bytes),
    )
    requirements = PlanOptions(memory_bytes=NEEDED_BYTES, context_tokens=CONTEXT_TOKENS, mode=mode)
    plan_document = make_plan(manifest, facts, requirements)
    expectation = _expected(package, plan_document, device)
    known_us = 1e3 * _known_ms(
        expectation.sequential_ms_per_token, expectation.neuron_ms_per_token, expectation.accelerator_wait_ms_per_token
    )
    overheads_us = [
        max(MIN_US, (_token_us(row) * (1 - row["message_share"]) - known_us) / LAYERS)
        for row, _ in _repetitions(package, plan_document, device, progress)
    ]
    return RunOverhead(mode=mode, us=Figure.of(overheads_us))


def _measured(
    package: Package, device: Device, mode: StepMode, workers: int, progress: Callable[[], None]
) -> StepPoint:
    requirements = PlanOptions(memory_bytes=NEEDED_BYTES, context_tokens=CONTEXT_TOKENS, mode=mode)
    plan_document = make_plan(package.manifest, device_facts(device, workers), requirements)
    rows = [row for row, _ in _repetitions(package, plan_document, device, progress)]
    return StepPoint(
        mode=mode,
        workers=workers,
        kernels_us=Figure.of([_kernels_us(package, plan_document, device)]),
        step_us=Figure.of([_token_us(row) * (1 - row["message_share"]) for row in rows]),
        between_us=Figure.of([_token_us(row) * row["message_share"] for row in rows]),
    )


def _with_reads(
    profile: DeviceProfile, package: Package, device: Device, progress: Callable[[], None]
) -> DeviceProfile:
    """Add read factors, then delays, which are what the factors do not explain."""
    workers = profile.decode_workers
    together = _reading(package, device, "predicted", workers, progress)
    profile = dataclasses.replace(profile, read_factors=together.factors(profile))
    device = dataclasses.replace(device, profile=profile)
    delays = together.delays(device)
    for count in sorted({1, workers}):
        delays += _reading(package, device, "exact", count, progress).delays(device)
    return dataclasses.replace(profile, read_delays=delays)


@frozen
class _Reading:
    """Repetitions of a number of tokens with flash reads.

    rows: results of the repetitions, as `Bench.row` returns them
    loading_s: processor time of loader and cache in each repetition
    """

    package: Package
    plan_document: Plan
    tokens: int
    rows: list[dict[str, Any]]
    loading_s: list[float]

    @property
    def workers(self) -> int:
        return len(self.plan_document.compute.decode_workers())

    @property
    def is_enough(self) -> bool:
        """True if each repetition had at least one read per layer and token, on average."""
        return all(float(row["flash_reads_per_token"]) >= LAYERS for row in self.rows)

    def factors(self, profile: DeviceProfile) -> tuple[ReadFactor, ...]:
        """Return the processor time of a read, relative to a loader without a run; empty if there are too few reads."""
        if not self.is_enough:
            return ()
        ratios = []
        for row, loading_s in zip(self.rows, self.loading_s, strict=True):
            reads = row["flash_reads_per_token"]
            alone_us = profile.read_cpu_us(int(row["flash_bytes_per_token"] / reads), reads / LAYERS)
            ratios.append(max(MIN_FIGURE, 1e6 * loading_s / (self.tokens * reads * alone_us)))
        return (ReadFactor(workers=self.workers, factor=Figure.of(ratios)),)

    def delays(self, device: Device) -> tuple[ReadDelay, ...]:
        """Return the part of a layer's wait that the costs of its reads do not explain; empty if there are too few."""
        if not self.is_enough:
            return ()
        plan_document, manifest = self.plan_document, self.package.manifest
        facts = (
            plan_document.compute,
            plan_document.memory,
            plan_document.flash,
            device.flash,
            device.memory_speed,
            device.profile,
        )
        firing = rates(manifest, plan_document.compute.mode)
        waiting, step_reads = decode_reads(manifest, firing, *facts, tokens=self.tokens // 2)
        delays_us = []
        for row in self.rows:
            reads, size = round(row["flash_reads_per_token"]), round(row["flash_bytes_per_token"])
            counted = dataclasses.replace(step_reads, reads=reads, read_bytes=size)
            delay_ms = waiting.delay_ms(counted, _token_us(row) * row["exposed_io_share"] / 1e3)
            assert delay_ms is not None
            delays_us.append(max(MIN_US, 1e3 * delay_ms))
        together = step_reads.issued == IssueTime.TOGETHER
        return (ReadDelay(together=together, workers=self.workers, us=Figure.of(delays_us)),)


def _reading(package: Package, device: Device, mode: StepMode, workers: int, progress: Callable[[], None]) -> _Reading:
    requirements = PlanOptions(ffn_resident_share=RESIDENT[mode], context_tokens=CONTEXT_TOKENS, mode=mode)
    plan_document = make_plan(package.manifest, device_facts(device, workers), requirements)
    tokens = READS_TOKENS[mode]
    repetitions = list(_repetitions(package, plan_document, device, progress, tokens))
    return _Reading(
        package, plan_document, tokens, [row for row, _ in repetitions], [loading_s for _, loading_s in repetitions]
    )


def _token_us(row: dict[str, Any]) -> float:
    return float(1e6 / row["tokens_per_s"])


def _repetitions(
    package: Package, plan_document: Plan, device: Device, progress: Callable[[], None], tokens: int = TOKENS
) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield a row of each repetition, as `bench` has it, and the processor time of reading in seconds."""
    with (
        started_run(package, plan_document, None, stays=False) as run,
        Client(run.directory.endpoint(CONTROL), run.failed) as client,
    ):
        wait_until_warm(client)
        bench = Bench(package, plan_document, device, Prompts(package, None), client)
        case = Case(name=f"tg{tokens}", prefill_tokens=0, decode_tokens=tokens)
        warm_up = bench.repeat(case, 0)
        progress()
        for number in range(1, REPETITIONS + 1):
            before_s = _loading_s(client)
            answer = bench.repeat(case, number)
            yield bench.row(case, warm_up, [answer], None), _loading_s(client) - before_s
            progress()


def _loading_s(client: Client) -> float:
    pids = [process.pid for process in client.status().processes if process.role in LOADING and process.pid]
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def _kernels_us(package: Package, plan_document: Plan, device: Device) -> float:
    expectation = _expected(package, plan_document, device)
    return 1e3 * _known_ms(expectation.sequential_ms_per_token, expectation.neuron_ms_per_token)


def _known_ms(*times_ms: float | None) -> float:
    known_ms = [time_ms for time_ms in times_ms if time_ms is not None]
    assert len(known_ms) == len(times_ms)
    return sum(known_ms)


def _expected(package: Package, plan_document: Plan, device: Device) -> Expected:
    """Return the expected times in the middle of a sequence."""
    return expected(
        package.manifest,
        rates(package.manifest, plan_document.compute.mode),
        plan_document.compute,
        plan_document.memory,
        plan_document.flash,
        device.flash,
        device.memory_speed,
        device.profile,
        position_tokens=TOKENS // 2,
    )
