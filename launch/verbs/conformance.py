"""`neuronpipe conformance ROLE [PACKAGE] [--use IMPLEMENTATION]`: whether an implementation does what its role must."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from neuronpipe.launch.conformance.suite import Result, Suite
from neuronpipe.launch.planning import PLANNING, add_package_argument, open_package
from neuronpipe.launch.progress import Elapsed, Progress
from neuronpipe.launch.searching import asked_accelerator
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
        help="package.module:Class, or argv:COMMAND in any language (default: our own)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        metavar="SECONDS",
        help="how long any answer may take (default: %(default).0f)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    """Try everything; 0 when all of it passed, 1 otherwise."""
    if not 0 < arguments.patience <= 600:
        raise UserError(f"--patience {arguments.patience:g}: between 0 and 600 seconds")
    use = None if arguments.use is None else Implementation.parse(arguments.use, Path.cwd())
    package = open_package(arguments.package, plain=arguments.json)
    with Elapsed(plain=arguments.json) as elapsed:
        elapsed.say(PLANNING)
        planned = _plan(package, arguments.role)
    suite = Suite(package, planned, arguments.role, use, arguments.patience)
    with Progress(f"trying {arguments.role}", "checks", plain=arguments.json) as progress:
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
    """Two decode workers, three texts at once, half of the neurons resident; no process has a core to itself. An
    accelerator only to be tried: on the first device there is."""
    backends = {ACCELERATOR: "opencl"} if role == ACCELERATOR else {}
    accelerator = asked_accelerator(backends.get(ACCELERATOR), None, package.manifest)
    device = device_facts(probe(package.path), WORKERS, backends=backends, accelerator=accelerator)
    specs = tuple(replace(spec, core=None) for spec in device.processes)
    wanted = PlanOptions(ffn_resident_share=RESIDENT, sequences=SEQUENCES)
    return make_plan(package.manifest, replace(device, processes=specs), wanted)


def _line(result: Result) -> str:
    found = f"{'FAILED' if result.why else 'ok':<7}{result.name}{': ' + result.why if result.why else ''}"
    return f"{found}  ({result.seconds:.1f} s)"
