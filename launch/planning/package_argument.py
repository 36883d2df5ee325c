"""The PACKAGE word of a command line: its declaration, and opening the package that it names."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.planning.source_package import package_of
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.pull.catalog import refuse_unpulled
from neuronpipe.plans.pull.package_library import package_path, refuse_unknown
from neuronpipe.plans.pull.source_models import is_source


def add_package_argument(
    parser: argparse.ArgumentParser,
    *,
    has_default: bool = True,
    shapes: str = "",
    more: str = "",
    type: Callable[[str], Path | str] = package_path,
    action: type[argparse.Action] | str = "store",
) -> None:
    """Declare PACKAGE; without it, the value is the demo.

    has_default: whether the help names this default; a verb that refuses the demo reports the missing word itself
    shapes: text about shapes, for verbs that accept the name of a shape as well
    more: text that ends the help
    type, action: as in `ArgumentParser.add_argument`
    """
    parser.add_argument(
        "package",
        nargs="?",
        type=type,
        action=action,
        default=DEMO,
        metavar="PACKAGE|SHAPE" if shapes else "PACKAGE",
        help="package directory, name from `neuronpipe list`, GGUF file or Hugging Face folder (converted once"
        f"{'; default: the demo, which completes Python code' if has_default else ''}){shapes}{more}",
    )


def add_packages_argument(parser: argparse.ArgumentParser) -> None:
    """Declare PACKAGE as a word that may be repeated; without it, the demo is used."""
    parser.add_argument(
        "package",
        nargs="*",
        type=package_path,
        default=[DEMO],
        metavar="PACKAGE",
        help="package directory or name from `neuronpipe list` (default: the demo, which completes Python code); with "
        "several, each has a run only while requests name it",
    )


def open_package(path: Path, *, plain: bool = False) -> Package:
    """Open a package. A GGUF file or a Hugging Face folder is converted first, unless that was done before.

    plain: show progress as lines, not as a bar

    Raises UserError, which lists the packages if there is none at `path`.
    """
    refuse_missing(path)
    return Package.open(package_of(path, plain=plain) if is_source(path) else path)


def refuse_missing(path: Path) -> None:
    """Raise UserError if there is nothing at `path` and it reads like the name of a package, a file or a shape.

    A word that contains a blank is not refused, because it may be a prompt.
    """
    if os.path.exists(path):
        return
    refuse_unpulled(str(path))
    if len(path.parts) == 1:  # else it names a file, or a model of a hub
        from neuronpipe.plans.lab.shapes.models import refuse_shape  # slow to import, and only needed for the error

        refuse_shape(str(path))
    refuse_unknown(path)
