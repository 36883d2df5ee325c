"""`neuronpipe inspect [PACKAGE] [--json]`: what a package holds and how it lies on flash."""

from __future__ import annotations

import argparse
import json

from neuronpipe.launch.planning import add_package_argument
from neuronpipe.plans.inspect import describe, render
from neuronpipe.plans.package.reader import Package


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `inspect`."""
    add_package_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    """Describe the package."""
    description = describe(Package.open(arguments.package))
    print(json.dumps(description, indent=2) if arguments.json else render(description))
    return 0
