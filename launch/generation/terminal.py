"""Output of an answer to a terminal or a pipe."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable

from neuronpipe.launch.generation.wrapping import SoftWrap
from neuronpipe.launch.progress import CANNOT_WIPE

DIM = "\x1b[2m", "\x1b[22m"  # begins and ends dimmed text
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and new line


class AnswerOutput:
    """The output of one answer on stdout: wrapped at blanks on a terminal, unchanged into a pipe."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdout.isatty()
        self._wrap: Callable[[str], str] = str
        self._dim = self._undim = ""
        if self.is_terminal and os.environ.get("TERM", "") not in CANNOT_WIPE:
            self._wrap = SoftWrap(lambda: shutil.get_terminal_size().columns).feed
            self._dim, self._undim = DIM

    def write(self, text: str) -> None:
        """Write and flush text of a model; on a terminal without its control characters."""
        self.write_trusted(for_terminal(text) if self.is_terminal else text)

    def write_dimmed(self, text: str) -> None:
        """Write and flush text of a model that is not the answer itself, such as reasoning."""
        sys.stdout.write(f"{self._dim}{self._wrap(for_terminal(text))}{self._undim}")
        sys.stdout.flush()

    def write_trusted(self, text: str) -> None:
        """Write and flush text of the user, control characters included."""
        sys.stdout.write(self._wrap(text))
        sys.stdout.flush()


def for_terminal(text: str) -> str:
    """Replace control characters in text of a model, which must not control the user's terminal."""
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)
