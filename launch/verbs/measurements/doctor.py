"""`neuronpipe doctor [PACKAGE] [--json]`: check this machine, and give advice."""

from __future__ import annotations

import argparse
import dataclasses
import json

from neuronpipe.launch.doctor.checks import checks, render
from neuronpipe.launch.formats import as_typed
from neuronpipe.launch.planning.package_argument import add_package_argument, open_package
from neuronpipe.launch.progress import Progress
from neuronpipe.plans.pull.package_library import refuse_unknown
from neuronpipe.plans.pull.source_models import is_source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_package_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    refuse_unknown(arguments.package)
    path = arguments.package
    directory = open_package(path, plain=arguments.json).path if is_source(path) else path
    with Progress("checking and measuring", "checks", plain=arguments.json, steady=True) as progress:
        findings = checks(directory, progress)
    if arguments.json:
        print(json.dumps({"checks": [dataclasses.asdict(check) for check in findings]}))
    else:
        print(as_typed(render(findings)), end="")
    return int(any(check.state == "fail" for check in findings))
