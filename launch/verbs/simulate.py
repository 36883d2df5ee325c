"""`neuronpipe simulate DEVICE [PACKAGE|SHAPE] [--policy NAME] [--memory BYTES] [-o FILE] [--picture FILE.svg]`: how
fast a model would be on a device that need not be here."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from neuronpipe.launch.arguments.shapes import flash_of_a_shape, measured_place, no_activity, no_model_named
from neuronpipe.launch.formats import parse_bytes, parse_share, show_bytes
from neuronpipe.launch.planning import (
    DEMO,
    Subject,
    add_package_argument,
    add_plan_arguments,
    open_package,
    planned_for,
)
from neuronpipe.launch.progress import Elapsed, Progress
from neuronpipe.launch.trace.chrome import write_chrome
from neuronpipe.launch.trace.picture import write_picture
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.lab.simulate.device_description import planner_device
from neuronpipe.plans.lab.simulate.device_file import (
    THIS_MACHINE,
    DeviceModel,
    known_devices,
    read_device,
    this_machine,
)
from neuronpipe.plans.lab.simulate.events import TaskSpan
from neuronpipe.plans.lab.simulate.models import SimulatedModel, known_models, model_named, model_of
from neuronpipe.plans.lab.simulate.recording import Recording
from neuronpipe.plans.lab.simulate.shape_manifest import manifest_of_shape
from neuronpipe.plans.lab.simulate.simulate import (
    PlannedRun,
    Result,
    SimulationOptions,
    sequences_of,
    simulate,
    simulate_plan,
)
from neuronpipe.plans.lab.simulate.systems import SYSTEMS, system_named
from neuronpipe.plans.lab.synth.trajectory import PRESETS
from neuronpipe.plans.measure.probe import probe
from neuronpipe.plans.number_format import show_number
from neuronpipe.plans.package.atomic_output import whole_file
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import MODES
from neuronpipe.plans.planner.search import UNLIMITED_BYTES
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.spans import KINDS
from neuronpipe.services.monitor.span_rings import Row, Span

TRACED_TOKENS = 3
_NUMBER = {kind.name: kind.number for kind in KINDS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("device", metavar="DEVICE", help=f"one of {', '.join(known_devices())}, or a device file")
    add_package_argument(parser, shapes=f"; or a shape: {', '.join(known_models())}")
    parser.add_argument("--policy", choices=SYSTEMS, default="ours", help="whose work is simulated (default: ours)")
    parser.add_argument("--memory", type=parse_bytes, metavar="BYTES", help="limit for the whole run, e.g. 7GB")
    parser.add_argument(
        "--ffn-resident", type=parse_share, metavar="SHARE", help="share of feed-forward bytes, e.g. 50%%"
    )
    parser.add_argument(
        "--mode", choices=MODES, help="of our own system (default: predicted where there is a predictor)"
    )
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="texts at once (default: 1)")
    parser.add_argument("--prompt", type=int, default=512, metavar="TOKENS", help="of the prefill (default: 512)")
    parser.add_argument("--tokens", type=int, default=192, metavar="N", help="to decode and count (default: 192)")
    parser.add_argument("--preset", choices=PRESETS, default="default", help="of the workload (default: default)")
    parser.add_argument("--seed", type=int, default=1, help="of the workload (default: 1)")
    parser.add_argument("--recording", type=Path, metavar="FILE.npz", help="what a text really wanted, instead")
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
            read_device(arguments.device)  # who names the model alone is told of the device that is missing
        raise UserError(f"simulate {arguments.device}: {no_model_named()}")
    model, package = _model(arguments.package, plain=arguments.json)
    with Elapsed(plain=arguments.json) as elapsed:
        elapsed.say("simulating")  # on a busy machine the imports have taken seconds
    system = system_named(arguments.policy)
    planned = system.name == "ours" and arguments.batch == 1
    if arguments.mode is not None and not planned:
        raise UserError(f"--mode {arguments.mode}: of our own system and one text, which have a plan")
    machine = _this_machine(package) if arguments.device == THIS_MACHINE else None
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
    recording = None if arguments.recording is None else Recording.load(arguments.recording)
    traced = TRACED_TOKENS if arguments.output or arguments.picture else 0
    if planned:
        run = _under_plan(model, package, machine, device, arguments)
        texts, sampled = sequences_of(run.manifest, run.plan.compute.mode, options, recording)
    with Progress("simulating", "tokens", plain=arguments.json, steady=True) as progress:
        if planned:
            result, decoded = simulate_plan(
                run,
                texts,
                1,
                sampled=sampled,
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
    print(json.dumps(dataclasses.asdict(result)) if arguments.json else "\n".join(_shown(result)))
    return 0


def _model(path: Path, *, plain: bool) -> tuple[SimulatedModel, Package | None]:
    """The model, and its package where it has one."""
    if not path.exists():
        return model_named(str(path)), None
    package = open_package(path, plain=plain)
    return model_of(package.manifest), package


def _this_machine(package: Package | None) -> Device:
    def say(line: str) -> None:
        print(f"neuronpipe: {line}", file=sys.stderr)

    if package is not None:
        return probe(package.path, say=say)
    measured, device = measured_place(say)
    say(flash_of_a_shape(measured, device))
    return device


def _under_plan(
    model: SimulatedModel,
    package: Package | None,
    machine: Device | None,
    device: DeviceModel,
    arguments: argparse.Namespace,
) -> PlannedRun:
    """As `run` would plan it there; machine: where that is this one. Without a limit everything is in memory, but on
    this machine what `run` would take."""
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    wanted = parser.parse_args([])
    wanted.memory, wanted.ffn_resident = arguments.memory, arguments.ffn_resident
    if wanted.memory is not None and wanted.ffn_resident is not None:
        raise UserError("--memory and --ffn-resident: one decides the other; leave one of the two out")
    if machine is None and wanted.memory is None:
        wanted.memory, wanted.ffn_resident = UNLIMITED_BYTES, wanted.ffn_resident or 1.0
    manifest = manifest_of_shape(model) if package is None else package.manifest
    wanted.mode = arguments.mode or ("exact" if manifest.predictor is None else "predicted")
    subject = Subject(
        manifest=manifest,
        read_activity=no_activity if package is None else package.read_activity,
        device=planner_device(device, manifest) if machine is None else machine,
    )
    made = planned_for(wanted, subject, several=False, gateway=False)
    assert made.search is not None  # no file was given
    _, found = made.search
    return PlannedRun(device=device, manifest=manifest, plan=made.plan, facts=found.chosen.device)


def _shown(result: Result) -> Iterator[str]:
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
    yield f"memory     {show_bytes(result.memory_bytes)}"
    yield "simulated; `tests/bench/results/simulated-paper.md` says how far such figures are off"


def rows_of(traces: tuple[tuple[TaskSpan, ...], ...]) -> list[Row]:
    """Simulated tokens as the rings of a run would show them: a computing core or an NPU is a decode worker, flash is
    what the loader reads, and the coordinator waits for all of them."""
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
