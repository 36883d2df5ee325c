"""`neuronpipe help [VERB]`: what the verbs are, or what one takes; the same as `neuronpipe VERB --help`."""

from __future__ import annotations

import argparse

from neuronpipe.launch import cli


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", nargs="*", metavar="VERB", help="a verb, e.g. run (default: show all verbs)")


def main(arguments: argparse.Namespace) -> int:
    print(cli.help_page(arguments.topic), end="")
    return 0
