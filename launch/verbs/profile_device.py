"""`neuronpipe profile device [PACKAGE]`: measure this machine for the planner, in less than a minute, and keep that.

`profile diff` is beside it in profile_diff.py. A package that is called `device` is written ./device.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from neuronpipe.launch.formats import as_typed
from neuronpipe.launch.planning import add_package_argument
from neuronpipe.launch.profile.page import render, warnings
from neuronpipe.launch.profile.picture import write_picture
from neuronpipe.launch.progress import Progress
from neuronpipe.plans.device.kept import doubt, keep_profile
from neuronpipe.plans.device.measure import measure_profile
from neuronpipe.plans.device.probe import profile_path, this_device
from neuronpipe.plans.device.profile import DeviceProfile, read_profile
from neuronpipe.plans.package.whole import whole_file
from neuronpipe.plans.pull.packages import refuse_unknown
from neuronpipe.protocol.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_package_argument(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the profile there as well")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw its curves: kernels, memory, flash")
    parser.add_argument(
        "--show", type=Path, metavar="FILE", help="measure nothing; show, or draw, what was measured before"
    )
    parser.add_argument("--json", action="store_true", help="print the profile as one JSON object")


def main(arguments: argparse.Namespace) -> int:
    if arguments.svg is not None and arguments.svg.suffix != ".svg":
        raise UserError(f"{arguments.svg}: pictures are SVG; give a name that ends in .svg")
    if arguments.show is not None:
        if arguments.output is not None:
            raise UserError("--show and --output: what is shown is in a file already; leave one of the two out")
        profile = read_profile(arguments.show)
    else:
        profile = _measured(arguments.package, plain=arguments.json)
    if arguments.output is not None:
        with whole_file(arguments.output) as place:
            place.write_text(profile.to_json(), encoding="utf-8")
    if arguments.svg is not None:
        write_picture(arguments.svg, profile)
    if arguments.json:
        print(profile.to_json(), end="")
        for line in warnings(profile):
            print(f"neuronpipe: {as_typed(line)}", file=sys.stderr)
    else:
        print(as_typed(render(profile)))
    return 0


def _measured(directory: Path, *, plain: bool) -> DeviceProfile:
    """Measure, and keep it for starts."""
    refuse_unknown(directory)
    with Progress("measuring", "figures", plain=plain) as progress:
        profile = measure_profile(directory, progress=progress)
    path = profile_path(this_device(), directory)
    if not keep_profile(path, profile) and doubt(profile) is not None:
        print("neuronpipe: not kept: the profile measured before is beyond doubt, and stays", file=sys.stderr)
    return profile
