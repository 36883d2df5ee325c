"""`neuronpipe ask [--run DIR] TEXT`: say something to the model of a run that is up."""

from __future__ import annotations

import argparse
from pathlib import Path

from neuronpipe.launch.chat.conversation import asked_in_conversation
from neuronpipe.launch.client import attach
from neuronpipe.launch.formats import parse_text
from neuronpipe.launch.generation import add_generation_arguments, generate, generate_request
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.run_directory import RunDirectory, RunFile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="?", type=parse_text, metavar="TEXT", help="the same as -p TEXT")
    parser.add_argument("--run", type=Path, metavar="DIR", help="run directory (default: the only live run)")
    add_generation_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    if arguments.text is not None:
        if arguments.prompt is not None:
            raise UserError("TEXT and -p TEXT: what to say is given twice; leave one of the two out")
        arguments.prompt = arguments.text
    ask = generate_request(arguments)
    directory, run_file = RunDirectory.find(arguments.run)
    if not arguments.raw:
        ask = asked_in_conversation(ask, _package(run_file), arguments.system)
    with attach(directory.path) as client:
        generate(client, arguments, ask, stays=True)
    return 0


def _package(run_file: RunFile) -> Package:
    try:
        return Package.open(Path(run_file.package))
    except UserError as error:
        raise UserError(f"whether the model has a chat template cannot be seen: {error}; --raw asks without") from None
