"""`neuronpipe profile device [PACKAGE]`: measure this machine, and store the device profile for the planner.

Measured are kernels, memory, an accelerator, whole steps of runs, and flash, by reading the package's file. The profile
is stored in the user's cache, for this device and the package's file system; the package is not changed. --flash
measures flash alone, --show nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from neuronpipe.launch.arguments.plan_arguments import parse_backend
from neuronpipe.launch.formats import as_typed
from neuronpipe.launch.planning.package_argument import add_package_argument, open_package
from neuronpipe.launch.profile.accelerator import accelerator_options
from neuronpipe.launch.profile.device_profile import measure_device_profile
from neuronpipe.launch.profile.picture import write_picture
from neuronpipe.launch.profile.text_report import render, warnings
from neuronpipe.launch.progress import Progress
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.device.profile import DeviceProfile, read_profile
from neuronpipe.plans.measure.cached_profile import cache_profile
from neuronpipe.plans.measure.device_measurement import measure_flash
from neuronpipe.plans.measure.probe import profile_path, this_device
from neuronpipe.plans.package.atomic_output import whole_file
from neuronpipe.plans.plan.document import ACCELERATOR
from neuronpipe.plans.pull.package_library import refuse_unknown
from neuronpipe.plans.pull.source_models import is_source
from neuronpipe.protocol.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_package_argument(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the profile to a file as well")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw its curves: kernels, memory, flash")
    parser.add_argument(
        "--flash",
        action="store_true",
        help="measure only flash again, and keep the other figures of the stored profile",
    )
    parser.add_argument(
        "--show", type=Path, metavar="FILE", help="show or draw a profile from a file, without measuring"
    )
    parser.add_argument(
        "--backend",
        type=parse_backend,
        metavar=f"{ACCELERATOR}=NAME[:OPTIONS]",
        help="the accelerator to measure, e.g. accelerator=opencl:NVIDIA (default: the first one, if any)",
    )
    parser.add_argument("--json", action="store_true", help="print the profile as one JSON object")


def main(arguments: argparse.Namespace) -> int:
    if arguments.picture is not None and arguments.picture.suffix != ".svg":
        raise UserError(f"{arguments.picture}: pictures are SVG; give a name that ends in .svg")
    role, backend = arguments.backend or (ACCELERATOR, None)
    if role != ACCELERATOR:
        raise UserError(f"--backend {role}={backend}: only an accelerator can be named; write {ACCELERATOR}=opencl")
    if backend is not None and (arguments.show is not None or arguments.flash):
        raise UserError("--backend and --show or --flash: neither measures an accelerator; leave one of the two out")
    if arguments.show is not None:
        if arguments.output is not None:
            raise UserError("--show and --output: the profile is in a file already; leave one of the two out")
        if arguments.flash:
            raise UserError("--show and --flash: only one of them measures; leave one of the two out")
        profile = read_profile(arguments.show)
    else:
        profile = _measure(arguments.package, backend, flash_alone=arguments.flash, plain=arguments.json)
    if arguments.output is not None:
        with whole_file(arguments.output) as place:
            place.write_text(profile.to_json(), encoding="utf-8")
    if arguments.picture is not None:
        write_picture(arguments.picture, profile)
    if arguments.json:
        print(profile.to_json(), end="")
        for line in warnings(profile):
            print(f"neuronpipe: {as_typed(line)}", file=sys.stderr)
    else:
        print(as_typed(render(profile)))
    return 0


def _measure(directory: Path, backend: str | None, *, flash_alone: bool, plain: bool) -> DeviceProfile:
    """Measure and store the profile.

    backend: the accelerator's, if one is named
    """
    refuse_unknown(directory)
    if is_source(directory):
        directory = open_package(directory, plain=plain).path
    device = this_device()
    path = profile_path(device, directory)
    before = _stored_profile(path, device) if flash_alone else None
    options = None if flash_alone else accelerator_options(backend)
    with Progress("measuring", "figures", plain=plain) as progress:
        if before is not None:
            profile = measure_flash(before, directory, progress=progress)
        else:
            profile = measure_device_profile(directory, device, options, progress)
    if (reason := cache_profile(path, profile)) is not None:
        print(f"neuronpipe: the earlier profile stays, because {reason}", file=sys.stderr)
    return profile


def _stored_profile(path: Path, device: Device) -> DeviceProfile:
    """Read the stored profile. Raises UserError if there is none for this device."""
    try:
        profile = read_profile(path)
        profile.check(device.id, str(path))
    except UserError as error:
        raise UserError(
            f"--flash: there is no stored profile with the other figures ({error}); leave --flash out once"
        ) from None
    return profile
