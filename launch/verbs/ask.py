"""`neuronpipe ask [--run DIR] -p TEXT`: generate with a run that is up."""

from __future__ import annotations

import argparse
from pathlib import Path

from neuronpipe.launch.client import attach
from neuronpipe.launch.generation import add_generation_arguments, generate, generate_request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, metavar="DIR", help="run directory (default: the only live run)")
    add_generation_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    ask = generate_request(arguments)
    with attach(arguments.run) as client:
        generate(client, arguments, ask)
    return 0
