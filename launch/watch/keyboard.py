"""Single keys from a terminal, without waiting for a line."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from types import TracebackType
from typing import Any, Self

LONGEST_KEY_BYTES = 8


class Keyboard:
    """While the context lasts keys come at once; a standard input that is no terminal has none."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def __enter__(self) -> Self:
        if sys.stdin.isatty():
            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def pressed(self, within_s: float) -> str:
        """The next key, an arrow as the characters it sends; empty when there was none in this time."""
        if self._before is None:
            time.sleep(within_s)
            return ""
        ready = select.select([sys.stdin], [], [], within_s)[0]
        return os.read(sys.stdin.fileno(), LONGEST_KEY_BYTES).decode("utf-8", "replace") if ready else ""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)
