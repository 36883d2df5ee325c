"""The prompt as a word: `run PACKAGE TEXT`, `run TEXT`, `ask TEXT`; several words are one text, with blanks between."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from neuronpipe.launch.formats import parse_text
from neuronpipe.launch.planning import add_package_argument
from neuronpipe.plans.pull.package_library import package_path
from neuronpipe.protocol.errors import UserError

RULE = "; a first word that holds a blank and is no path is TEXT already"
PATHS = ("/", "./", "../", "~")


def add_text_argument(parser: argparse.ArgumentParser, more: str = "") -> None:
    """TEXT, any number of words. more: what else the help says."""
    parser.add_argument(
        "text",
        nargs="*",
        type=parse_text,
        metavar="TEXT",
        help=f"the same as -p TEXT; several words are one text{more}",
    )


def add_package_and_text_arguments(parser: argparse.ArgumentParser) -> None:
    """PACKAGE, the demo by default, and TEXT; `take_text` tells them apart."""
    add_package_argument(parser, type=_package_or_text, action=_PackageOrText, more=RULE)
    parser.set_defaults(first_text=None)
    add_text_argument(parser)


def take_text(arguments: argparse.Namespace) -> None:
    """Put what was written as words where -p puts it. Raises UserError where the prompt was given by both."""
    words, first = list(arguments.text), getattr(arguments, "first_text", None)
    if first is not None and arguments.prompt is not None and not words:
        arguments.package, first = Path(first), None  # only one of the two can be the prompt
    if first is not None:
        words.insert(0, first)
    if not words:
        return
    if arguments.prompt is not None:
        raise UserError("TEXT and -p TEXT: what to say is given twice; leave one of the two out")
    arguments.prompt = " ".join(words)


def is_text(word: str) -> bool:
    """True if a word that stands where a package may stand is a prompt: it holds a blank, and is no path."""
    if not any(map(str.isspace, word)) or word.startswith(PATHS) or word.endswith(".gguf"):
        return False
    return not os.path.exists(word)


def _package_or_text(word: str) -> Path | str:
    return parse_text(word) if is_text(word) else package_path(word)


class _PackageOrText(argparse.Action):
    """Leaves the default package where the word is a prompt."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if isinstance(values, str):
            namespace.first_text = values
        else:
            namespace.package = values
