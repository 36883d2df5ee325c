"""The words of a command line that are a prompt, and their place beside PACKAGE."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from neuronpipe.launch.arguments.values import parse_text
from neuronpipe.launch.planning.package_argument import add_package_argument
from neuronpipe.plans.pull.package_library import package_path
from neuronpipe.protocol.errors import UserError

FIRST_WORD_RULE = "; a first word that contains a blank and is not a path is TEXT"
PATH_PREFIXES = ("/", "./", "../", "~")


def add_text_argument(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Declare TEXT, any number of words.

    more: text that ends the help
    """
    parser.add_argument(
        "text",
        nargs="*",
        type=parse_text,
        metavar="TEXT",
        help=f"the prompt, as with -p; several words are joined by blanks{more}",
    )


def add_package_and_text_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare PACKAGE, the demo by default, and TEXT; `join_text` tells them apart."""
    add_package_argument(parser, type=_package_or_text, action=_StorePackageOrText, more=FIRST_WORD_RULE)
    parser.set_defaults(first_text=None)
    add_text_argument(parser)


def join_text(arguments: argparse.Namespace) -> None:
    """Join the words of TEXT and store them as the value of -p. Raises UserError if both were typed."""
    words, first = list(arguments.text), getattr(arguments, "first_text", None)
    if first is not None and arguments.prompt is not None and not words:
        arguments.package, first = Path(first), None  # the prompt is -p TEXT, so the word must be the package
    if first is not None:
        words.insert(0, first)
    if not words:
        return
    if arguments.prompt is not None:
        raise UserError("TEXT and -p TEXT: the prompt is given twice; leave one of the two out")
    arguments.prompt = " ".join(words)


def is_text(word: str) -> bool:
    """Return True if a word at the place of PACKAGE is a prompt: it contains a blank, and is not a path."""
    if not any(map(str.isspace, word)) or word.startswith(PATH_PREFIXES) or word.endswith(".gguf"):
        return False
    return not os.path.exists(word)


def _package_or_text(word: str) -> Path | str:
    return parse_text(word) if is_text(word) else package_path(word)


class _StorePackageOrText(argparse.Action):
    """Store a prompt as `first_text`, and leave the default package then."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if isinstance(values, str):
            namespace.first_text = values
        else:
            namespace.package = values
