"""Decode steps of a run beside the kernels measured by themselves: what a device profile cannot know of kernels alone.

A small synthetic package, larger than most caches, runs with everything resident. What its workers take for a step,
over what the kernels' own speeds give for it, holds what lies between kernels, waiting for each other, and what the
run's other processes take from the workers' cores; the rest of a token's time lies between steps.

The same package with few of its value rows missing, in exact mode, tells what a read takes in a run: a gate that fires
late in a layer names a read for which everybody waits. And with more of it missing, in predicted mode, how much more
processor time a read takes than by itself. Where an accelerator was measured, the package runs with all its neurons
there, in both modes: what a layer takes longer than kernels, copies and calls by themselves.
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
from neuronpipe.plans.device.accelerator import InRun
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
"""Where reads are measured. A text's first tokens miss most, and would tell of bursts that later ones do not have."""
RESIDENT: dict[StepMode, float] = {"exact": 0.85, "predicted": 0.6}
"""Of the feed-forward, where reads are measured: few value rows miss, which gates name; or neurons of every layer."""
LEAST_US = 0.1  # of what took no longer than is known: a profile has figures above zero
MODES: tuple[StepMode, ...] = ("exact", "predicted")
LOADING = ("loader", "cache")  # the roles that take processor time for reads
NEEDED_BYTES = 1 << 30  # of memory: a run of it takes half as much


def with_steps(profile: DeviceProfile, device: Device, progress: Callable[[], None]) -> DeviceProfile:
    """The profile with steps in both modes with all decode workers, and in exact mode with one, and with the delays of
    reads in the latter, and with those of its accelerator; unchanged where memory is short, or its speed is not in the
    profile. progress is called `steps_count(device, ...)` times at most."""
    memory_speed = profile.memory_speed()
    if device.memory_available_bytes < NEEDED_BYTES or memory_speed is None:
        return profile
    cases = _cases(profile.decode_workers)
    alone = kernels_alone(profile, cases)
    device = dataclasses.replace(device, profile=alone, flash=profile.flash_curve(), memory_speed=memory_speed)
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
    """Return the profile as if a step took no longer than its kernels, whose time is wanted by itself: nothing is to be
    assumed of what is being measured."""
    same = Figure(median=1.0, spread=0.0)
    steps = (
        StepPoint(mode=mode, workers=workers, kernels_us=same, step_us=same, between_us=same) for mode, workers in cases
    )
    return dataclasses.replace(profile, steps=tuple(steps))


def steps_count(device: Device, *, accelerator: bool = False) -> int:
    """How many measurements that is, at most; accelerator: whether the profile has one."""
    cases = _cases(len(decode_cores(device)))
    runs = len(cases) + sum(mode == "exact" for mode, _ in cases) + 1 + (len(MODES) if accelerator else 0)
    return 1 + runs * (1 + REPETITIONS)


def _cases(workers: int) -> tuple[tuple[StepMode, int], ...]:
    all_of_them: tuple[tuple[StepMode, int], ...] = (("exact", workers), ("predicted", workers))
    return all_of_them if workers == 1 else (("exact", 1), *all_of_them)


def _make_package(target: Path) -> Package:
    from neuronpipe.plans.lab.synth.shapes import SHAPES
    from neuronpipe.plans.lab.synth.synthesize import synthesize  # these bring numpy

    model = dataclasses.replace(SHAPES["turbosparse-1b"], layer_kinds=(LayerKind(LAYERS),))
    return synthesize("steps", model, target)


def _with_accelerator(
    profile: DeviceProfile, package: Package, device: Device, progress: Callable[[], None]
) -> DeviceProfile:
    """With what a layer takes in a run whose neurons are all an accelerator's; of a device whose memory does not hold
    them, as many as it does."""
    found = measured_accelerator(profile, None, package.manifest)
    if profile.accelerator is None or found is None:
        return profile
    in_runs = tuple(_in_run(package, device, mode, *found, progress) for mode in MODES)
    return dataclasses.replace(profile, accelerator=dataclasses.replace(profile.accelerator, in_runs=in_runs))


def _in_run(
    package: Package,
    device: Device,
    mode: StepMode,
    accelerator: Accelerator,
    backend: str,
    progress: Callable[[], None],
) -> InRun:
    assert device.profile is not None
    manifest, blocks = package.manifest, package.manifest.layout.blocks
    limit_bytes = offloaded_weights_bytes(manifest, blocks) + offload_scratch_bytes(manifest, blocks, 1)
    facts = device_facts(
        dataclasses.replace(device, profile=dataclasses.replace(device.profile, accelerator=None)),  # so it gets all
        device.profile.decode_workers,
        backends={ACCELERATOR: backend},
        accelerator=dataclasses.replace(accelerator, limit_bytes=limit_bytes),
    )
    wanted = PlanOptions(memory_bytes=NEEDED_BYTES, context_tokens=CONTEXT_TOKENS, mode=mode)
    made = make_plan(manifest, facts, wanted)
    one = _expected(package, made, device)
    known_us = 1e3 * _known_ms(one.sequential_ms_per_token, one.neuron_ms_per_token, one.accelerator_wait_ms_per_token)
    besides_us = [
        max(LEAST_US, (_token_us(row) * (1 - row["message_share"]) - known_us) / LAYERS)
        for row, _ in _repetitions(package, made, device, progress)
    ]
    return InRun(mode=mode, us=Figure.of(besides_us))


def _measured(
    package: Package, device: Device, mode: StepMode, workers: int, progress: Callable[[], None]
) -> StepPoint:
    wanted = PlanOptions(memory_bytes=NEEDED_BYTES, context_tokens=CONTEXT_TOKENS, mode=mode)
    made = make_plan(package.manifest, device_facts(device, workers), wanted)
    rows = [row for row, _ in _repetitions(package, made, device, progress)]
    return StepPoint(
        mode=mode,
        workers=workers,
        kernels_us=Figure.of([_kernels_us(package, made, device)]),
        step_us=Figure.of([_token_us(row) * (1 - row["message_share"]) for row in rows]),
        between_us=Figure.of([_token_us(row) * row["message_share"] for row in rows]),
    )


def _with_reads(
    profile: DeviceProfile, package: Package, device: Device, progress: Callable[[], None]
) -> DeviceProfile:
    """First what keeps the loader busy, since reads that are named by themselves wait for each other."""
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
    """Repetitions of so many tokens with flash in between. loading_s: the processor time of reading, of each row."""

    package: Package
    made: Plan
    tokens: int
    rows: list[dict[str, Any]]
    loading_s: list[float]

    @property
    def workers(self) -> int:
        return len(self.made.compute.decode_workers())

    @property
    def is_enough(self) -> bool:
        """Whether most layers read something."""
        return all(float(row["flash_reads_per_token"]) >= LAYERS for row in self.rows)

    def factors(self, profile: DeviceProfile) -> tuple[ReadFactor, ...]:
        """How much more processor time a read took than it does by itself."""
        if not self.is_enough:
            return ()
        found = []
        for row, loading_s in zip(self.rows, self.loading_s, strict=True):
            reads = row["flash_reads_per_token"]
            alone_us = profile.read_cpu_us(int(row["flash_bytes_per_token"] / reads), reads / LAYERS)
            found.append(max(MIN_FIGURE, 1e6 * loading_s / (self.tokens * reads * alone_us)))
        return (ReadFactor(workers=self.workers, factor=Figure.of(found)),)

    def delays(self, device: Device) -> tuple[ReadDelay, ...]:
        """What is left of a layer's wait when all that is known of these reads is taken from it."""
        if not self.is_enough:
            return ()
        made, manifest = self.made, self.package.manifest
        known = made.compute, made.memory, made.flash, device.flash, device.memory_speed, device.profile
        firing = rates(manifest, made.compute.mode)
        waiting, step_reads = decode_reads(manifest, firing, *known, tokens=self.tokens // 2)
        found = []
        for row in self.rows:
            reads, size = round(row["flash_reads_per_token"]), round(row["flash_bytes_per_token"])
            counted = dataclasses.replace(step_reads, reads=reads, read_bytes=size)
            delay_ms = waiting.delay_ms(counted, _token_us(row) * row["exposed_io_share"] / 1e3)
            assert delay_ms is not None
            found.append(max(LEAST_US, 1e3 * delay_ms))
        together = step_reads.issued == IssueTime.TOGETHER
        return (ReadDelay(together=together, workers=self.workers, us=Figure.of(found)),)


def _reading(package: Package, device: Device, mode: StepMode, workers: int, progress: Callable[[], None]) -> _Reading:
    wanted = PlanOptions(ffn_resident_share=RESIDENT[mode], context_tokens=CONTEXT_TOKENS, mode=mode)
    made = make_plan(package.manifest, device_facts(device, workers), wanted)
    tokens = READS_TOKENS[mode]
    repetitions = list(_repetitions(package, made, device, progress, tokens))
    return _Reading(package, made, tokens, [row for row, _ in repetitions], [loading_s for _, loading_s in repetitions])


def _token_us(row: dict[str, Any]) -> float:
    return float(1e6 / row["tokens_per_s"])


def _repetitions(
    package: Package, made: Plan, device: Device, progress: Callable[[], None], tokens: int = TOKENS
) -> Iterator[tuple[dict[str, Any], float]]:
    """A row of each, as `bench` has it, and the processor time of reading in seconds."""
    with (
        started_run(package, made, None, stays=False) as live,
        Client(live.directory.endpoint(CONTROL), live.failed) as client,
    ):
        wait_until_warm(client)
        bench = Bench(package, made, device, Prompts(package, None), client)
        case = Case(name=f"tg{tokens}", prefill_tokens=0, decode_tokens=tokens)
        warm_up = bench.repeat(case, 0)
        progress()
        for number in range(1, REPETITIONS + 1):
            before_s = _loading_s(client)
            answer = bench.repeat(case, number)
            yield bench.row(case, warm_up, [answer], None), _loading_s(client) - before_s
            progress()


def _loading_s(client: Client) -> float:
    """The processor time that the processes have taken that read."""
    pids = [process.pid for process in client.status().processes if process.role in LOADING and process.pid]
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def _kernels_us(package: Package, made: Plan, device: Device) -> float:
    one = _expected(package, made, device)
    return 1e3 * _known_ms(one.sequential_ms_per_token, one.neuron_ms_per_token)


def _known_ms(*times_ms: float | None) -> float:
    """The sum of what was measured for certain."""
    known_ms = [time_ms for time_ms in times_ms if time_ms is not None]
    assert len(known_ms) == len(times_ms)
    return sum(known_ms)


def _expected(package: Package, made: Plan, device: Device) -> Expected:
    """In the middle of a text."""
    return expected(
        package.manifest,
        rates(package.manifest, made.compute.mode),
        made.compute,
        made.memory,
        made.flash,
        device.flash,
        device.memory_speed,
        device.profile,
        position_tokens=TOKENS // 2,
    )
