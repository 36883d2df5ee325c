"""`neuronpipe plan [PACKAGE|SHAPE] [--device DEVICE] [-o FILE] [--explain | --diff FILE | --json]`: show a plan and
its alternatives, compare it with another plan, or write it to a file."""

from __future__ import annotations

import argparse
import difflib
import json
import shlex
from pathlib import Path

from neuronpipe.launch.arguments import plan_arguments as planning
from neuronpipe.launch.formats import show_bytes
from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.planning.options import PlanOptions
from neuronpipe.launch.planning.package_argument import add_package_argument, open_package
from neuronpipe.launch.planning.plan import PlanResult, plan_for, plan_here
from neuronpipe.launch.planning.search import Subject
from neuronpipe.launch.planning.shapes import model_required, no_activity, plan_shape_here
from neuronpipe.plans.history.history_file import forget_history, read_history
from neuronpipe.plans.history.history_report import runs_table
from neuronpipe.plans.history.run_terms import MIN_TOKENS
from neuronpipe.plans.lab.devices.device_description import caveats, planner_device
from neuronpipe.plans.lab.devices.device_file import THIS_MACHINE, DeviceModel, read_device
from neuronpipe.plans.lab.shapes.models import known_models, model_named, shape_named
from neuronpipe.plans.lab.shapes.pulled_manifest import manifest_of_pulled_shape, shape_assumptions
from neuronpipe.plans.package.atomic_output import whole_file
from neuronpipe.plans.plan.document import ACCELERATOR, Plan, read_plan
from neuronpipe.plans.plan.report import difference, expectations, explain
from neuronpipe.plans.planner import tradeoffs
from neuronpipe.plans.pull.catalog import catalog, catalog_model
from neuronpipe.protocol.errors import UserError, quoted
from neuronpipe.protocol.schema import to_json

COMMON_OPTIONS = ("package", *planning.COMMON, "target_speed", "device", "output", "explain", "diff", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_package_argument(parser, shapes="; or a shape, which needs no package: a name that `neuronpipe simulate` knows")
    planning.add_plan_arguments(parser)
    parser.add_argument("--gateway", action="store_true", help="include a gateway, as `serve` does")
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        help="plan for another device: a name that `neuronpipe simulate` knows, e.g. oneplus-12, or a device file "
        "(default: this machine)",
    )
    parser.add_argument(
        "--forget",
        action="store_true",
        help="first remove what earlier runs of the package have counted and measured",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the plan to a file for --plan")
    show = parser.add_mutually_exclusive_group()
    show.add_argument(
        "--explain",
        action="store_true",
        help="show only what the plan expects, why, and what earlier runs were planned and measured at",
    )
    show.add_argument("--diff", type=Path, metavar="FILE", help="show the differences from the plan in FILE")
    show.add_argument("--json", action="store_true", help="print the plan as JSON")


def main(arguments: argparse.Namespace) -> int:
    options, path, gateway = planning.plan_options(arguments), arguments.package, arguments.gateway
    device, history = None if arguments.device == THIS_MACHINE else arguments.device, None
    if device is not None:
        result = _plan_for_device(path, options, device, gateway=gateway)
    elif _is_shape(path):
        result = _plan_for_shape(path, options, gateway=gateway)
    else:
        package = open_package(path, plain=arguments.json)
        if arguments.forget:
            forget_history(package.manifest.id)
        result = plan_here(package, options, plain=arguments.json, several=gateway, gateway=gateway)
        if options.history:
            history = read_history(package.manifest.id, result.plan.device_id)
    plan = result.plan
    if arguments.output is not None:
        with whole_file(arguments.output) as file:
            file.write_text(plan.to_json(), encoding="utf-8")
    if arguments.diff is not None:
        print(difference(read_plan(arguments.diff), plan), end="")
        return 0
    alternatives = None if result.search is None else tradeoffs.describe(*result.search)
    if arguments.json:
        runs = [] if history is None else to_json(history).get("runs", [])
        print(json.dumps(json.loads(plan.to_json()) | {"search": alternatives, "earlier_runs": runs}, indent=2))
        return 0
    if arguments.explain:
        print(expectations(plan), end="")
    else:
        print(explain(plan), end="" if alternatives is None else f"\n{tradeoffs.render(alternatives)}")
    if history is not None and history.runs:
        print(f"\n{runs_table(history)}", end="")
    elif arguments.explain and history is not None:
        print(f"\nearlier runs of this package on this device: none; they are compared after {MIN_TOKENS} tokens")
    if device is not None:
        share = plan.memory.slots_bytes / plan.memory.ffn_bytes
        words = ["neuronpipe", "simulate", device, str(path), "--ffn-resident", f"{share:.0%}"]
        print(f"\nthe same in the simulator: {shlex.join(words)}")
    return 0


def _plan_for_device(path: Path, options: PlanOptions, device: str, *, gateway: bool) -> PlanResult:
    """Make the plan for a known device or one from a file. Raises UserError."""
    if path is DEMO:
        raise UserError(f"--device {device}: {model_required()}")
    if options.backend(ACCELERATOR) is not None:
        raise UserError(
            f"--backend {ACCELERATOR}=... and --device {device}: a device file describes no accelerator, and this "
            "machine's is another; leave one of the two out"
        )
    subject, reasons = _subject(path, read_device(device))
    result = plan_for(subject, options, several=gateway, gateway=gateway)
    if options.plan_file is None:
        result = result.with_reasons(*reasons)
    _refuse_larger(result.plan, subject.device.memory_total_bytes, device)
    return result


def _is_shape(path: Path) -> bool:
    """Return True if the path names a shape, or a model of the catalog. Raises UserError for a misspelled shape."""
    if path.exists():
        return False
    name = str(path)
    if shape_named(name) is not None or catalog_model(name) is not None:
        return True
    if near := difflib.get_close_matches(name, [*catalog(), *known_models()], n=1, cutoff=0.8):
        raise UserError(f"{quoted(name)}: no such package or shape; did you mean {near[0]}?")
    return False


def _plan_for_shape(path: Path, options: PlanOptions, *, gateway: bool) -> PlanResult:
    shape = model_named(str(path))
    manifest = manifest_of_pulled_shape(shape)
    result = plan_shape_here(manifest, options, several=gateway, gateway=gateway)
    return result.with_reasons(*shape_assumptions(shape, manifest))


def _subject(path: Path, model: DeviceModel) -> tuple[Subject, tuple[str, ...]]:
    """Return the package or shape on a device, and the reasons that its plan must state."""
    if path.exists():
        package = open_package(path)
        subject = Subject(
            manifest=package.manifest,
            read_activity=package.read_activity,
            device=planner_device(model, package.manifest),
        )
        return subject, caveats(model)
    shape = model_named(str(path))
    manifest = manifest_of_pulled_shape(shape)
    subject = Subject(manifest=manifest, read_activity=no_activity, device=planner_device(model, manifest))
    return subject, (*caveats(model), *shape_assumptions(shape, manifest))


def _refuse_larger(plan: Plan, usable_bytes: int, device: str) -> None:
    if (needed_bytes := plan.memory.total_bytes()) > usable_bytes:
        raise UserError(
            f"the plan takes {show_bytes(needed_bytes)}, and one program may use {show_bytes(usable_bytes)} of {device}"
        )
