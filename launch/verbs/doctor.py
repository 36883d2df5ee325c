"""`neuronpipe doctor [PACKAGE] [--json]`: check this machine and say what to do; exit code 1 when a check fails."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from neuronpipe.launch.demo import DEMO
from neuronpipe.launch.doctor import checks, render


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `doctor`."""
    # Not planning's argument: that module imports the kernels, which may be what is missing.
    parser.add_argument("package", nargs="?", type=Path, default=DEMO, metavar="PACKAGE", help="whose flash to measure")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    """Make all checks and show them."""
    made = checks(arguments.package)
    if arguments.json:
        print(json.dumps({"checks": [dataclasses.asdict(check) for check in made]}, indent=2))
    else:
        print(render(made), end="")
    return int(any(check.state == "fail" for check in made))
