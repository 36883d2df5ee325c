"""`neuronpipe doctor [PACKAGE] [--json]`: check this machine and say what to do about it."""

from __future__ import annotations

import argparse
import dataclasses
import json

from neuronpipe.launch.doctor.checks import checks, render
from neuronpipe.launch.formats import as_typed
from neuronpipe.launch.planning import add_package_argument, open_package
from neuronpipe.launch.progress import Progress
from neuronpipe.plans.pull.package_library import refuse_unknown
from neuronpipe.plans.pull.source_models import is_source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_package_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    """Check; 1 when something fails."""
    refuse_unknown(arguments.package)
    there = is_source(arguments.package)
    directory = open_package(arguments.package, plain=arguments.json).path if there else arguments.package
    with Progress("checking and measuring", "checks", plain=arguments.json, steady=True) as progress:
        made = checks(directory, progress)
    print(
        json.dumps({"checks": [dataclasses.asdict(check) for check in made]})
        if arguments.json
        else as_typed(render(made)),
        end="" if not arguments.json else "\n",
    )
    return int(any(check.state == "fail" for check in made))
