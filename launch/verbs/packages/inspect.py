"""`neuronpipe inspect [PACKAGE] [--json]`: show the contents of a package and their layout on flash.

With --activations, a synthetic package is computed, and its activation statistics are compared with those requested.
"""

from __future__ import annotations

import argparse
import json

from neuronpipe.launch.formats import as_typed
from neuronpipe.launch.planning.package_argument import add_package_argument, open_package
from neuronpipe.plans.history.history_file import read_history
from neuronpipe.plans.history.history_report import counted_line
from neuronpipe.plans.inspect import describe, render
from neuronpipe.plans.measure.probe import probe
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.schema import to_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_package_argument(parser)
    parser.add_argument(
        "--activations",
        action="store_true",
        help="for a synthetic package: compare requested and measured activation statistics",
    )
    parser.add_argument("--preset", default="default", help="workload to compute (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=384, metavar="N", help="tokens to compute (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    package = open_package(arguments.package, plain=arguments.json)
    if arguments.activations:
        return _compare_activations(arguments, package)
    device = probe(package.path)
    description, history = describe(package, device.flash), read_history(package.manifest.id, device.id)
    if arguments.json:
        print(json.dumps(description | {"history": to_json(history)}, indent=2))
        return 0
    print(as_typed(render(description)))
    if line := counted_line(history):
        print(f"history    {line}")
    return 0


def _compare_activations(arguments: argparse.Namespace, package: Package) -> int:
    from neuronpipe.launch.progress import Progress

    with Progress("computing", "tokens", plain=arguments.json, steady=True) as progress:
        # Imported here, with the progress already shown: numpy and the kernels take a while.
        from neuronpipe.plans.lab.synth import measured_statistics

        statistics = measured_statistics.measure(package, arguments.preset, arguments.tokens, progress)
    print(json.dumps(statistics) if arguments.json else measured_statistics.render(statistics))
    return 0
