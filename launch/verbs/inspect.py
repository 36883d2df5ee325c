"""`neuronpipe inspect [PACKAGE] [--json]`: what a package holds and how it lies on flash.

With --activations a synthetic package is computed instead, and what was requested of it is shown beside what came out.
"""

from __future__ import annotations

import argparse
import json

from neuronpipe.launch.formats import as_typed
from neuronpipe.launch.planning import add_package_argument, open_package
from neuronpipe.plans.inspect import describe, render
from neuronpipe.plans.measure.probe import probe
from neuronpipe.plans.package.reader import Package


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_package_argument(parser)
    parser.add_argument(
        "--activations", action="store_true", help="of a synthetic package: compare requested and measured statistics"
    )
    parser.add_argument("--preset", default="default", help="workload to compute (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=384, metavar="N", help="tokens to compute (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    package = open_package(arguments.package, plain=arguments.json)
    if arguments.activations:
        return _activations(arguments, package)
    description = describe(package, probe(package.path).flash)
    print(json.dumps(description, indent=2) if arguments.json else as_typed(render(description)))
    return 0


def _activations(arguments: argparse.Namespace, package: Package) -> int:
    from neuronpipe.launch.progress import Progress

    with Progress("computing", "tokens", plain=arguments.json, steady=True) as progress:
        from neuronpipe.plans.lab.synth import (
            measured_statistics as measure,  # numpy and the kernels: only for this, and they take a while
        )

        statistics = measure.measure(package, arguments.preset, arguments.tokens, progress)
    print(json.dumps(statistics) if arguments.json else measure.render(statistics))
    return 0
