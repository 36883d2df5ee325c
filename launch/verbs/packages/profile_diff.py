"""`neuronpipe profile diff A [B|PACKAGE]`: show which figures of two device profiles differ by more than their spread.

A and B are files; a package stands for the stored profile of this device and the package's file system.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.profile.text_report import render_difference
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
        help="another file, or a package for the stored profile of this device and the package's file system (default: "
        "the demo model's)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, which includes unchanged figures")


def main(arguments: argparse.Namespace) -> int:
    before = read_profile(arguments.before)
    if arguments.after.is_dir():
        after, name = _stored_profile(arguments.after), "the stored profile"
    else:
        after, name = read_profile(arguments.after), str(arguments.after)
    comparison = compare_profiles(before, after)
    if arguments.json:
        changes = [
            {**dataclasses.asdict(change), "ratio": change.ratio, "beyond_spread": change.beyond_spread}
            for change in comparison.changes
        ]
        same = before.device_id == after.device_id
        print(json.dumps({"same_device": same, **dataclasses.asdict(comparison), "changes": changes}))
        return 0
    if before.device_id != after.device_id:
        print(f"two devices: {before.device_id} and {after.device_id}")
    print(render_difference(comparison, str(arguments.before), name))
    return 0


def _stored_profile(directory: Path) -> DeviceProfile:
    path = profile_path(this_device(), directory)
    if not path.exists():
        raise UserError(
            "B: no file is named, and there is no stored profile of this device and file system; "
            "name a second file, or measure with `neuronpipe profile device`"
        )
    return read_profile(path)
