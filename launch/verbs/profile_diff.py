"""`neuronpipe profile diff A [B|PACKAGE]`: what changed from one device profile to another, beyond its spread."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.profile.page import render_difference
from neuronpipe.plans.device.profile import DeviceProfile, read_profile
from neuronpipe.plans.device.profile_difference import compare_profiles
from neuronpipe.plans.measure.probe import profile_path, this_device
from neuronpipe.plans.pull.package_library import package_path
from neuronpipe.protocol.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, metavar="A", help="a file of `neuronpipe profile device -o`")
    parser.add_argument(
        "after",
        type=package_path,
        nargs="?",
        default=DEMO,
        metavar="B|PACKAGE",
        help="another one; or a package: what is kept of this device for its file system (default: the demo model's)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, with what did not change as well")


def main(arguments: argparse.Namespace) -> int:
    before = read_profile(arguments.before)
    if arguments.after.is_dir():
        after, name = _kept(arguments.after), "what is kept"
    else:
        after, name = read_profile(arguments.after), str(arguments.after)
    found = compare_profiles(before, after)
    if arguments.json:
        changes = [
            {**dataclasses.asdict(change), "ratio": change.ratio, "beyond_spread": change.beyond_spread}
            for change in found.changes
        ]
        same = before.device_id == after.device_id
        print(json.dumps({"same_device": same, **dataclasses.asdict(found), "changes": changes}))
        return 0
    if before.device_id != after.device_id:
        print(f"two devices: {before.device_id} and {after.device_id}")
    print(render_difference(found, str(arguments.before), name))
    return 0


def _kept(directory: Path) -> DeviceProfile:
    path = profile_path(this_device(), directory)
    if not path.exists():
        raise UserError(
            "B: there is none, and none is kept of this device and file system; "
            "name a second file, or measure with `neuronpipe profile device`"
        )
    return read_profile(path)
