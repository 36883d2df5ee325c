"""`neuronpipe rm NAME ...`: remove packages by name, and files of interrupted pulls.

Only full names are accepted: it never removes a folder that the user made."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import NoReturn

from neuronpipe.launch.formats import show_bytes
from neuronpipe.plans.history.history_file import forget_history
from neuronpipe.plans.package.atomic_output import disk_usage_bytes
from neuronpipe.plans.package.manifest import MANIFEST
from neuronpipe.plans.package.parsing.parse import read_manifest
from neuronpipe.plans.pull.package_library import (
    package_names,
    packages_folder,
    pull_names,
    pulls_folder,
    refuse_unknown,
    refuse_used,
    remove_package,
    remove_pull,
)
from neuronpipe.protocol.errors import UserError, safe_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="name from `neuronpipe list`")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    names = list(dict.fromkeys(arguments.names))
    packages, pulls = package_names(), pull_names()
    for name in names:  # check all names before one package is removed
        if name not in packages and name not in pulls:
            _refuse(name)
        refuse_used(name)
    freed_bytes = 0
    for name in names:
        for existing, folder, remove in (
            (packages, packages_folder(), remove_package),
            (pulls, pulls_folder(), remove_pull),
        ):
            if name in existing:
                size = disk_usage_bytes(folder / name)
                with contextlib.suppress(UserError):  # a damaged package can be removed as well
                    forget_history(read_manifest(folder / name / MANIFEST).id)
                remove(name)
                freed_bytes += size
    if arguments.json:
        print(json.dumps({"removed": names, "freed_bytes": freed_bytes}))
    else:
        print(f"removed {', '.join(names)}: {show_bytes(freed_bytes)} are free again")
    return 0


def _refuse(name: str) -> NoReturn:
    refuse_unknown(Path(name))
    raise UserError(
        f"{safe_name(name)}: is not the name of a package; see `neuronpipe list`; remove a path with the shell's rm"
    )
