"""`neuronpipe help [VERB]`: list the verbs, or show the options of one, like `neuronpipe VERB --help`."""

from __future__ import annotations

import argparse

from neuronpipe.launch.arguments.verbs import help_page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", nargs="*", metavar="VERB", help="a verb, e.g. run (default: list all verbs)")
    parser.add_argument("--all", action="store_true", help="show all options, as --help-all does")


def main(arguments: argparse.Namespace) -> int:
    print(help_page(arguments.topic, show_all=arguments.all), end="")
    return 0
