"""`neuronpipe ask [PACKAGE] TEXT [--run DIR]`: generate text with a live run."""

from __future__ import annotations

import argparse
from pathlib import Path

from neuronpipe.launch.arguments import generation_arguments as generation
from neuronpipe.launch.arguments.prompt_arguments import add_text_argument, join_text
from neuronpipe.launch.client import attach
from neuronpipe.launch.generation.answer import generate
from neuronpipe.launch.generation.conversation import with_chat_template
from neuronpipe.launch.generation.prompt import checked_prompt
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.pull.package_library import package_path
from neuronpipe.protocol.errors import NotRunning, UserError
from neuronpipe.protocol.run_directory import RunDirectory, RunFile

COMMON_OPTIONS = ("text", *generation.COMMON, "run")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_text_argument(parser, "; the first of several may be a PACKAGE, whose live run answers")
    parser.add_argument("--run", type=Path, metavar="DIR", help="run directory (default: the only live run)")
    generation.add_generation_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    package = _take_package_word(arguments)
    join_text(arguments)
    options = generation.generation_options(arguments)
    request = options.sampling.request(checked_prompt(options.prompt, None))
    directory, run_file = RunDirectory.find(arguments.run) if package is None else _run_of(package)
    form = None
    if not options.raw:
        request, form = with_chat_template(request, _open_package(run_file), options.system)
    with attach(directory.path) as client:
        generate(
            client,
            request,
            as_json=options.as_json,
            run_stays=True,
            form=form,
            hides_thinking=options.hides_thinking,
        )
    return 0


def _take_package_word(arguments: argparse.Namespace) -> Path | None:
    """Remove the first of several words if it names a package, and return the package's path."""
    words = arguments.text
    if arguments.run is not None or len(words) < 2 or not (path := package_path(words[0])).is_dir():
        return None
    del words[0]
    return path


def _run_of(package: Path) -> tuple[RunDirectory, RunFile]:
    """Return the live run of a package. Raises NotRunning if there is none, UserError if there are several."""
    runs = [run for run in RunDirectory.live() if Path(run[1].package).resolve() == package.resolve()]
    if not runs:
        raise NotRunning(f"no live run has {package.name}; start one with `neuronpipe up {package.name}`")
    if len(runs) > 1:
        paths = ", ".join(str(directory.path) for directory, _ in runs)
        raise UserError(f"several runs have {package.name}, name one with --run: {paths}")
    return runs[0]


def _open_package(run_file: RunFile) -> Package:
    try:
        return Package.open(Path(run_file.package))
    except UserError as error:
        raise UserError(f"the package's chat template cannot be read: {error}; --raw does without it") from None
