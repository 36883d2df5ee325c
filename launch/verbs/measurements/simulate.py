"""`neuronpipe simulate DEVICE [PACKAGE|SHAPE] [-o FILE] [--picture FILE.svg]`: the speed of a model on a simulated
device."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from neuronpipe.launch.arguments.values import parse_bytes, parse_share
from neuronpipe.launch.formats import show_bytes
from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.planning.options import PlanOptions
from neuronpipe.launch.planning.package_argument import add_package_argument, open_package
from neuronpipe.launch.planning.plan import plan_for
from neuronpipe.launch.planning.search import Subject
from neuronpipe.launch.planning.shapes import flash_caveat, model_required, no_activity, probe_without_package
from neuronpipe.launch.progress import Elapsed, Progress
from neuronpipe.launch.trace.chrome import write_chrome
from neuronpipe.launch.trace.picture import write_picture
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.lab.devices.device_description import planner_device
from neuronpipe.plans.lab.devices.device_file import (
    THIS_MACHINE,
    DeviceModel,
    known_devices,
    read_device,
    this_machine,
)
from neuronpipe.plans.lab.shapes.models import SimulatedModel, known_models, model_named, model_of
from neuronpipe.plans.lab.shapes.pulled_manifest import manifest_of_pulled_shape
from neuronpipe.plans.lab.simulate.events import TaskSpan
from neuronpipe.plans.lab.simulate.recording import Recording
from neuronpipe.plans.lab.simulate.simulate import (
    PlannedRun,
    Result,
    SimulationOptions,
    check_options,
    sequences_of,
    simulate,
    simulate_plan,
)
from neuronpipe.plans.lab.simulate.systems import OURS, POLICIES, system_named
from neuronpipe.plans.lab.synth.trajectory import PRESETS
from neuronpipe.plans.measure.kernel_speed import kernel_cases
from neuronpipe.plans.measure.probe import probe
from neuronpipe.plans.number_format import show_number
from neuronpipe.plans.package.atomic_output import whole_file
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import MODES
from neuronpipe.plans.planner.search import UNLIMITED_BYTES
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.memory.spans import KINDS
from neuronpipe.services.monitor.span_rings import Row, Span

TRACED_TOKENS = 3
_NUMBER = {kind.name: kind.number for kind in KINDS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    devices = ", ".join([*known_devices(), THIS_MACHINE])
    parser.add_argument("device", metavar="DEVICE", help=f"one of {devices}, or a device file")
    add_package_argument(parser, has_default=False, shapes=f"; or a shape: {', '.join(known_models())}")
    parser.add_argument(
        "--policy", choices=POLICIES, default=OURS.name, help="system to simulate (default: ours, neuronpipe)"
    )
    parser.add_argument("--memory", type=parse_bytes, metavar="BYTES", help="memory limit of the whole run, e.g. 7GB")
    parser.add_argument(
        "--ffn-resident",
        type=parse_share,
        metavar="SHARE",
        help="share of the feed-forward weights in memory, e.g. 50%%",
    )
    parser.add_argument(
        "--mode", choices=MODES, help="computation mode, with policy ours (default: predicted if there is a predictor)"
    )
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="concurrent sequences (default: 1)")
    parser.add_argument("--prompt", type=int, default=512, metavar="TOKENS", help="length of the prompt (default: 512)")
    parser.add_argument("--tokens", type=int, default=192, metavar="N", help="tokens to decode (default: 192)")
    parser.add_argument(
        "--preset", choices=PRESETS, default="default", help="preset of the workload (default: default)"
    )
    parser.add_argument("--seed", type=int, default=1, help="random seed of the workload (default: 1)")
    parser.add_argument(
        "--recording", type=Path, metavar="FILE.npz", help="use the recorded neurons of a real text instead"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE.json",
        help="write the last tokens as trace events, for ui.perfetto.dev",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the last tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    if arguments.picture is not None and arguments.picture.suffix != ".svg":
        raise UserError(f"{arguments.picture}: pictures are SVG; give a name that ends in .svg")
    if arguments.package is DEMO:
        if arguments.device != THIS_MACHINE:
            read_device(arguments.device)  # if only a model was typed, the error is about the missing device
        raise UserError(f"simulate {arguments.device}: {model_required()}")
    model, package = _model(arguments.package, plain=arguments.json)
    with Elapsed(plain=arguments.json) as elapsed:
        elapsed.say("simulating")  # on a busy machine the imports alone have taken seconds
    system = system_named(arguments.policy)
    has_plan = system is OURS
    if arguments.mode is not None and not has_plan:
        raise UserError(f"--mode {arguments.mode}: only with policy ours, which has a plan")
    machine = _this_machine(model, package) if arguments.device == THIS_MACHINE else None
    device = read_device(arguments.device) if machine is None else this_machine(machine)
    options = SimulationOptions(
        memory_bytes=arguments.memory,
        resident=arguments.ffn_resident,
        batch=arguments.batch,
        prompt_tokens=arguments.prompt,
        tokens=arguments.tokens,
        preset=arguments.preset,
        seed=arguments.seed,
    )
    check_options(options)
    recording = None if arguments.recording is None else Recording.load(arguments.recording)
    traced = TRACED_TOKENS if arguments.output or arguments.picture else 0
    if has_plan:
        plan_options = PlanOptions(
            memory_bytes=arguments.memory,
            ffn_resident_share=arguments.ffn_resident,
            sequences=options.batch,
            mode=arguments.mode,
        )
        run = _plan_run(model, package, machine, device, plan_options)
        sequences, sampled = sequences_of(run.manifest, run.plan.compute.mode, options, recording)
    with Progress("simulating", "tokens", plain=arguments.json, steady=True) as progress:
        if has_plan:
            result, decoded = simulate_plan(
                run,
                sequences,
                1,
                sampled=sampled,
                batch=options.batch,
                context_tokens=run.plan.compute.context_tokens // 2,
                prompt_tokens=options.prompt_tokens,
                traced_tokens=traced,
                progress=progress,
            )
        else:
            result, decoded = simulate(
                device, model, system, options, recording=recording, traced_tokens=traced, progress=progress
            )
    rows = rows_of(decoded.trace)
    if arguments.output is not None:
        with whole_file(arguments.output) as place, place.open("w", encoding="utf-8") as stream:
            write_chrome(stream, rows)
    if arguments.picture is not None:
        write_picture(arguments.picture, rows, f"{result.model} {result.policy}, simulated, {result.device}")
    print(json.dumps(dataclasses.asdict(result)) if arguments.json else "\n".join(_render(result)))
    return 0


def _model(path: Path, *, plain: bool) -> tuple[SimulatedModel, Package | None]:
    if not path.exists():
        return model_named(str(path)), None
    package = open_package(path, plain=plain)
    return model_of(package.manifest), package


def _this_machine(model: SimulatedModel, package: Package | None) -> Device:
    def say(line: str) -> None:
        print(f"neuronpipe: {line}", file=sys.stderr)

    if package is not None:
        return probe(package.path, say=say)
    measured, device = probe_without_package(kernel_cases(manifest_of_pulled_shape(model)), say)
    say(flash_caveat(measured, device))
    return device


def _plan_run(
    model: SimulatedModel,
    package: Package | None,
    machine: Device | None,
    device: DeviceModel,
    options: PlanOptions,
) -> PlannedRun:
    """Plan the run on the simulated device as `run` would.

    machine: this machine, if it is the simulated device; else None

    Without --memory, this machine gives a run what `run` would take, and any other device keeps everything in memory.
    """
    if options.memory_bytes is not None and options.ffn_resident_share is not None:
        raise UserError("--memory and --ffn-resident: one decides the other; leave one of the two out")
    if machine is None and options.memory_bytes is None:
        share = options.ffn_resident_share or 1.0
        options = dataclasses.replace(options, memory_bytes=UNLIMITED_BYTES, ffn_resident_share=share)
    manifest = manifest_of_pulled_shape(model) if package is None else package.manifest
    if options.mode is None:
        options = dataclasses.replace(options, mode="exact" if manifest.predictor is None else "predicted")
    subject = Subject(
        manifest=manifest,
        read_activity=no_activity if package is None else package.read_activity,
        device=planner_device(device, manifest) if machine is None else machine,
    )
    result = plan_for(subject, options, several=False, gateway=False)
    assert result.search is not None  # there is no plan file
    _, outcome = result.search
    return PlannedRun(device=device, manifest=manifest, plan=result.plan, facts=outcome.chosen.device)


def _render(result: Result) -> Iterator[str]:
    yield f"{result.model} on {result.device}, {result.policy}: {result.resident:.0%} of the feed-forward resident"
    yield f"decode     {show_number(result.tokens_per_s)} tokens/s (limit {show_number(result.limit_tokens_per_s)})"
    times = " / ".join(show_number(ms) for ms in (result.p50_ms, result.p90_ms, result.p99_ms))
    yield f"           {times} ms between tokens (p50 / p90 / p99)"
    yield f"prefill    {show_number(result.prefill_tokens_per_s)} tokens/s"
    yield (
        f"misses     {result.miss_rate:.1%} of active neurons (p99 {result.p99_miss_rate:.1%}), "
        f"{result.looked_miss_rate:.1%} of those looked up"
    )
    reads = f"{show_bytes(result.flash_bytes_per_token)} in {result.flash_reads_per_token:,.0f} reads"
    yield f"per token  {show_bytes(result.dram_bytes_per_token)} of DRAM, {reads} from flash"
    busy = ", ".join(f"{unit} {share:.0%}" for unit, share in result.busy.items())
    yield f"busy       {busy}; {result.exposed_io:.0%} of the time flash alone"
    yield f"memory     {show_bytes(result.memory_bytes)}, weights in {result.quantization}"
    yield "simulated; tests/bench/results/simulated-paper.md compares such figures with published ones"


def rows_of(traces: tuple[tuple[TaskSpan, ...], ...]) -> list[Row]:
    """Return simulated tokens as the span rings of a run.

    A core or an NPU stands for a decode worker, flash for the loader; the coordinator waits for all of them.
    """
    units = sorted({done.unit for token in traces for done in token}, key=lambda unit: (unit == "flash", unit))
    workers = [unit for unit in units if unit != "flash"]
    spans: dict[str, list[Span]] = {unit: [] for unit in ("coordinator", *units)}
    origin_s = 0.0
    for step, token in enumerate(traces, 1):
        ended_s = origin_s + max((done.ended_s for done in token), default=0.0)
        for done in token:
            began_ns, ended_ns = (round(1e9 * (origin_s + at_s)) for at_s in (done.began_s, done.ended_s))
            spans[done.unit].append(Span(began_ns, ended_ns, _NUMBER[done.kind], done.layer, done.value, step))
        began_ns = round(1e9 * origin_s)
        spans["coordinator"].append(Span(began_ns, began_ns, _NUMBER["send"], 0, len(workers), step))
        spans["coordinator"].append(Span(began_ns, round(1e9 * ended_s), _NUMBER["await"], 0, 1, step))
        origin_s = ended_s
    rows = [Row("coordinator", 0, 0, spans["coordinator"], 0)]
    rows += [Row("decode", n, 0, spans[unit], 0) for n, unit in enumerate(workers)]
    return rows + [Row("loader", 0, 0, spans[unit], 0) for unit in units if unit == "flash"]
