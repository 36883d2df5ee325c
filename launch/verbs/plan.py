"""`neuronpipe plan [PACKAGE|SHAPE] [--device DEVICE] [-o FILE] [--diff FILE] [--json]`: show the plan and what else
could be had, compare it or write it."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import shlex
from pathlib import Path

from neuronpipe.launch.arguments.shapes import no_activity, no_model_named, shape_here
from neuronpipe.launch.formats import show_bytes
from neuronpipe.launch.planning import (
    DEMO,
    Planned,
    Subject,
    add_package_argument,
    add_plan_arguments,
    open_package,
    planned,
    planned_for,
    refuse_contradictions,
)
from neuronpipe.plans.lab.simulate.device_description import caveats, planner_device
from neuronpipe.plans.lab.simulate.device_file import THIS_MACHINE, DeviceModel, read_device
from neuronpipe.plans.lab.simulate.models import known_models, model_named, shape_named
from neuronpipe.plans.lab.simulate.shape_manifest import manifest_of_shape, shape_assumptions
from neuronpipe.plans.package.atomic_output import whole_file
from neuronpipe.plans.plan.document import ACCELERATOR, Plan, read_plan
from neuronpipe.plans.plan.report import difference, explain
from neuronpipe.plans.planner import tradeoffs
from neuronpipe.protocol.errors import UserError, quoted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_package_argument(parser, shapes=f"; or a shape, of which there need be no package: {', '.join(known_models())}")
    add_plan_arguments(parser)
    parser.add_argument("--gateway", action="store_true", help="a plan for `serve`: with a gateway")
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        help="plan for a device that need not be here: a name that `neuronpipe simulate` knows, e.g. oneplus-12, or a "
        "device file (default: this machine)",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the plan, for --plan FILE")
    show = parser.add_mutually_exclusive_group()
    show.add_argument("--diff", type=Path, metavar="FILE", help="show where the plan differs from this one")
    show.add_argument("--json", action="store_true", help="print the plan as JSON")


def main(arguments: argparse.Namespace) -> int:
    elsewhere = None if arguments.device == THIS_MACHINE else arguments.device
    if elsewhere is None and _is_shape(arguments.package):
        found = _planned_shape(arguments)
    elif elsewhere is None:
        found = planned(arguments, several=arguments.gateway, gateway=arguments.gateway)
    else:
        found = _planned_elsewhere(arguments, elsewhere, gateway=arguments.gateway)
    made = found.plan
    if arguments.output is not None:
        with whole_file(arguments.output) as place:
            place.write_text(made.to_json(), encoding="utf-8")
    if arguments.diff is not None:
        print(difference(read_plan(arguments.diff), made), end="")
        return 0
    others = None if found.search is None else tradeoffs.describe(*found.search)
    if arguments.json:
        print(json.dumps(json.loads(made.to_json()) | {"search": others}, indent=2))
    else:
        print(explain(made), end="" if others is None else f"\n{tradeoffs.render(others)}")
        if elsewhere is not None:
            share = made.memory.slots_bytes / made.memory.ffn_bytes
            words = ["neuronpipe", "simulate", elsewhere, str(arguments.package), "--ffn-resident", f"{share:.0%}"]
            print(f"\nthe same in the simulator: {shlex.join(words)}")
    return 0


def _planned_elsewhere(arguments: argparse.Namespace, device: str, *, gateway: bool) -> Planned:
    """As `planned`, for a known device or one from a file."""
    refuse_contradictions(arguments)
    if arguments.package is DEMO:
        raise UserError(f"--device {device}: {no_model_named()}")
    if ACCELERATOR in dict(arguments.backend):
        raise UserError(
            f"--backend {ACCELERATOR}=... and --device {device}: a device file describes no accelerator, and this "
            "machine's is another; leave one of the two out"
        )
    model = read_device(device)
    subject, said = _subject(arguments.package, model)
    made = planned_for(arguments, subject, several=gateway, gateway=gateway)
    if arguments.plan is None:
        made = dataclasses.replace(made, plan=dataclasses.replace(made.plan, reasons=(*said, *made.plan.reasons)))
    _refuse_larger(made.plan, subject.device.memory_total_bytes, device)
    return made


def _is_shape(path: Path) -> bool:
    """Raises UserError for what is nearly the name of a shape, and nothing else."""
    if path.exists():
        return False
    name = str(path)
    if shape_named(name) is None and (near := difflib.get_close_matches(name, known_models(), n=1, cutoff=0.8)):
        raise UserError(f"{quoted(name)}: no such package or shape; did you mean {near[0]}?")
    return shape_named(name) is not None


def _planned_shape(arguments: argparse.Namespace) -> Planned:
    """As `planned`, for a shape that has no package."""
    refuse_contradictions(arguments)
    shape = model_named(str(arguments.package))
    made = shape_here(arguments, manifest_of_shape(shape), several=arguments.gateway, gateway=arguments.gateway)
    reasons = (*shape_assumptions(shape), *made.plan.reasons)
    return dataclasses.replace(made, plan=dataclasses.replace(made.plan, reasons=reasons))


def _subject(path: Path, model: DeviceModel) -> tuple[Subject, tuple[str, ...]]:
    """The package, or else the shape, on this device, and what a plan for it must say."""
    if path.exists():
        package = open_package(path)
        subject = Subject(
            manifest=package.manifest,
            read_activity=package.read_activity,
            device=planner_device(model, package.manifest),
        )
        return subject, caveats(model)
    shape = model_named(str(path))
    manifest = manifest_of_shape(shape)
    subject = Subject(manifest=manifest, read_activity=no_activity, device=planner_device(model, manifest))
    return subject, (*caveats(model), *shape_assumptions(shape))


def _refuse_larger(plan: Plan, usable_bytes: int, device: str) -> None:
    if (takes := plan.memory.total_bytes()) > usable_bytes:
        raise UserError(
            f"the plan takes {show_bytes(takes)}, and one program may use {show_bytes(usable_bytes)} of {device}"
        )
