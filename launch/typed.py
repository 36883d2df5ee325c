"""What was typed: texts, and the command, with which a line that a person is to paste has to begin."""

from __future__ import annotations

import argparse
import os
import shlex

ONLY_UTF8 = "not UTF-8, which texts have to be; `iconv -f latin1 -t utf-8` makes Latin-1 so"


def as_typed(text: str) -> str:
    """A text for a person, whose commands in backticks begin as this one was typed. Whoever writes such a text, further
    down, knows `neuronpipe` only."""
    return text.replace("`neuronpipe ", f"`{typed_command()} ")


def typed_command() -> str:
    """`neuronpipe`, or the path of the script of a checkout."""
    return shlex.quote(os.environ.get("NEURONPIPE_COMMAND") or "neuronpipe")


def line_to_paste(*words: object) -> str:
    """This command with other words, quoted for the shell where they need it."""
    return f"{typed_command()} {shlex.join(map(str, words))}"


def parse_text(text: str) -> str:
    """A text among the arguments. For argparse: raises ArgumentTypeError for bytes that are none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(ONLY_UTF8) from None
    return text
