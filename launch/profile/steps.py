"""Decode steps of a run beside the kernels measured by themselves: what a device profile cannot know of kernels alone.

A small synthetic package, larger than most caches, runs with everything resident. What its workers take for a step,
over what the kernels' own speeds give for it, holds what lies between kernels, waiting for each other, and what the
run's other processes take from the workers' cores; the rest of a token's time lies between steps.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from neuronpipe.launch.bench.cases import Case, Prompts
from neuronpipe.launch.bench.measure import Bench, wait_until_warm
from neuronpipe.launch.client import Client
from neuronpipe.launch.supervisor.start import started_run
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.device.figures import Figure
from neuronpipe.plans.device.points import StepMode, StepPoint
from neuronpipe.plans.device.probe import decode_cores
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.models.spec import LayerKind
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.firing import rates
from neuronpipe.plans.plan.plan import Plan
from neuronpipe.plans.plan.planner import Wanted, device_facts, plan
from neuronpipe.plans.plan.speed import expected
from neuronpipe.protocol.links import CONTROL

LAYERS = 8
TOKENS = 48
REPETITIONS = 5
CONTEXT_TOKENS = 256
CASE = Case(name=f"tg{TOKENS}", prefill_tokens=0, decode_tokens=TOKENS)
NEEDED_BYTES = 1 << 30  # of memory: a run of it takes half as much


def measure_steps(profile: DeviceProfile, device: Device, progress: Callable[[], None]) -> tuple[StepPoint, ...]:
    """Steps in both modes with all decode workers, and in exact mode with one; none where memory is short, or its speed
    is not in the profile. progress is called `steps_count(device)` times."""
    memory_speed = profile.memory_speed()
    if device.memory_available_bytes < NEEDED_BYTES or memory_speed is None:
        return ()
    device = dataclasses.replace(device, profile=profile, flash=profile.flash_curve(), memory_speed=memory_speed)
    with tempfile.TemporaryDirectory(prefix="neuronpipe-") as folder:
        package = _make_package(Path(folder) / "package")
        progress()
        return tuple(
            _measured(package, device, mode, workers, progress) for mode, workers in _cases(profile.decode_workers)
        )


def steps_count(device: Device) -> int:
    """How many measurements that is."""
    return 1 + len(_cases(len(decode_cores(device)))) * (1 + REPETITIONS)


def _cases(workers: int) -> tuple[tuple[StepMode, int], ...]:
    all_of_them: tuple[tuple[StepMode, int], ...] = (("exact", workers), ("predicted", workers))
    return all_of_them if workers == 1 else (("exact", 1), *all_of_them)


def _make_package(target: Path) -> Package:
    from neuronpipe.plans.synth.make import synthesize  # these bring numpy
    from neuronpipe.plans.synth.shapes import SHAPES

    model = dataclasses.replace(SHAPES["turbosparse-1b"], layer_kinds=(LayerKind(LAYERS),))
    return synthesize("steps", model, target)


def _measured(
    package: Package, device: Device, mode: StepMode, workers: int, progress: Callable[[], None]
) -> StepPoint:
    wanted = Wanted(memory_bytes=NEEDED_BYTES, context_tokens=CONTEXT_TOKENS, mode=mode)
    made = plan(package.manifest, device_facts(device, workers), wanted)
    steps_us, betweens_us = zip(*_repetitions(package, made, device, progress), strict=True)
    return StepPoint(
        mode=mode,
        workers=workers,
        kernels_us=Figure.of([_kernels_us(package, made, device)]),
        step_us=Figure.of(steps_us),
        between_us=Figure.of(betweens_us),
    )


def _repetitions(
    package: Package, made: Plan, device: Device, progress: Callable[[], None]
) -> Iterator[tuple[float, float]]:
    """Microseconds of a step and of what lies before the next one."""
    with (
        started_run(package, made, None, stays=False) as live,
        Client(live.directory.endpoint(CONTROL), live.failed) as client,
    ):
        wait_until_warm(client)
        bench = Bench(package, made, device, Prompts(package, None), client)
        warm_up = bench.ask(CASE, 0)
        progress()
        for number in range(1, REPETITIONS + 1):
            row = bench.row(CASE, warm_up, [bench.ask(CASE, number)], None)
            token_us = 1e6 / row["tokens_per_s"]
            yield token_us * (1 - row["message_share"]), token_us * row["message_share"]
            progress()


def _kernels_us(package: Package, made: Plan, device: Device) -> float:
    one = expected(
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
    assert one.sequential_ms_per_token is not None
    assert one.neuron_ms_per_token is not None
    return 1e3 * (one.sequential_ms_per_token + one.neuron_ms_per_token)
