"""`neuronpipe conformance ROLE [PACKAGE] [--use IMPLEMENTATION]`: test an implementation of a role."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from neuronpipe.launch.conformance.suite import Result, Suite
from neuronpipe.launch.planning.accelerator import named_accelerator
from neuronpipe.launch.planning.package_argument import add_package_argument, open_package
from neuronpipe.launch.planning.plan import PLANNING
from neuronpipe.launch.progress import Elapsed, Progress
from neuronpipe.plans.measure.probe import probe
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import ACCELERATOR, Plan
from neuronpipe.plans.planner.device_facts import device_facts
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.planner import make_plan
from neuronpipe.protocol.errors import UserError
from neuronpipe.services.runtime.implementations import SWAPPABLE, Implementation

WORKERS, SEQUENCES = 2, 3
RESIDENT = 0.5
PATIENCE_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("role", choices=SWAPPABLE, metavar="ROLE", help=f"one of {', '.join(SWAPPABLE)}")
    add_package_argument(parser)
    parser.add_argument(
        "--use",
        metavar="IMPLEMENTATION",
        help="package.module:Class, or argv:COMMAND in any language (default: the built-in one)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        metavar="SECONDS",
        help="time limit of each answer (default: %(default).0f)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.patience <= 600:
        raise UserError(f"--patience {arguments.patience:g}: between 0 and 600 seconds")
    use = None if arguments.use is None else Implementation.parse(arguments.use, Path.cwd())
    package = open_package(arguments.package, plain=arguments.json)
    with Elapsed(plain=arguments.json) as elapsed:
        elapsed.say(PLANNING)
        suite_plan = _plan(package, arguments.role)
    suite = Suite(package, suite_plan, arguments.role, use, arguments.patience)
    with Progress(f"testing {arguments.role}", "checks", plain=arguments.json) as progress:
        results = suite.run(lambda result: None if arguments.json else progress.print(_line(result)), progress)
    passed = all(not result.why for result in results)
    if arguments.json:
        report = {"role": arguments.role, "use": arguments.use, "passed": passed}
        print(json.dumps(report | {"checks": [asdict(result) for result in results]}))
    else:
        failed = sum(bool(result.why) for result in results)
        print(f"{arguments.role}: {len(results) - failed} passed" + (f", {failed} failed" if failed else ""))
    return 0 if passed else 1


def _plan(package: Package, role: str) -> Plan:
    """Plan two decode workers, three sequences and half of the neurons resident, without core pinning.

    There is an accelerator only to test one: the first device.
    """
    backends = {ACCELERATOR: "opencl"} if role == ACCELERATOR else {}
    accelerator = named_accelerator(backends.get(ACCELERATOR), None, package.manifest)
    device = device_facts(probe(package.path), WORKERS, backends=backends, accelerator=accelerator)
    specs = tuple(replace(spec, core=None) for spec in device.processes)
    options = PlanOptions(ffn_resident_share=RESIDENT, sequences=SEQUENCES)
    return make_plan(package.manifest, replace(device, processes=specs), options)


def _line(result: Result) -> str:
    outcome = f"{'FAILED' if result.why else 'ok':<7}{result.name}{': ' + result.why if result.why else ''}"
    return f"{outcome}  ({result.seconds:.1f} s)"
