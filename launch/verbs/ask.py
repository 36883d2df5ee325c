"""`neuronpipe ask [PACKAGE] TEXT [--run DIR]`: say something to the model of a run that is up."""

from __future__ import annotations

import argparse
from pathlib import Path

from neuronpipe.launch.arguments.prompt import add_text_argument, take_text
from neuronpipe.launch.chat.conversation import asked_in_conversation
from neuronpipe.launch.client import attach
from neuronpipe.launch.generation import add_generation_arguments, generate, generate_request
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.pull.package_library import package_path
from neuronpipe.protocol.errors import NotRunning, UserError
from neuronpipe.protocol.run_directory import RunDirectory, RunFile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_text_argument(parser, "; the first of several may be the PACKAGE whose live run answers")
    parser.add_argument("--run", type=Path, metavar="DIR", help="run directory (default: the only live run)")
    add_generation_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    package = _package_word(arguments)
    take_text(arguments)
    ask = generate_request(arguments)
    directory, run_file = RunDirectory.find(arguments.run) if package is None else _run_of(package)
    if not arguments.raw:
        ask = asked_in_conversation(ask, _package(run_file), arguments.system)
    with attach(directory.path) as client:
        generate(client, arguments, ask, stays=True)
    return 0


def _package_word(arguments: argparse.Namespace) -> Path | None:
    """The package that the first of several words names, which is no text then; None: all words are."""
    if arguments.run is not None or len(arguments.text) < 2 or not (path := package_path(arguments.text[0])).is_dir():
        return None
    del arguments.text[0]
    return path


def _run_of(package: Path) -> tuple[RunDirectory, RunFile]:
    """The live run of a package. Raises NotRunning where there is none, UserError where there are several."""
    live = [found for found in RunDirectory.live() if Path(found[1].package).resolve() == package.resolve()]
    if not live:
        raise NotRunning(f"no live run has {package.name}; start one with `neuronpipe up {package.name}`")
    if len(live) > 1:
        places = ", ".join(str(directory.path) for directory, _ in live)
        raise UserError(f"several runs have {package.name}, name one with --run: {places}")
    return live[0]


def _package(run_file: RunFile) -> Package:
    try:
        return Package.open(Path(run_file.package))
    except UserError as error:
        raise UserError(f"whether the model has a chat template cannot be seen: {error}; --raw asks without") from None
