"""Single keys from a terminal, without waiting for a line."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import termios
import time
import tty
from types import TracebackType
from typing import Any, Self

KEY = re.compile(r"\x1b[\[O][0-9;]*[~A-Za-z]|.", re.DOTALL)  # an arrow or the like as the characters it sends, or one
BEGUN = re.compile(r"\x1b([\[O][0-9;]*)?")
REST_S = 0.05  # for the rest of a key that has begun: it may come over a network
READ_BYTES = 64
GONE = "q"


class Keyboard:
    """While the context lasts keys come at once; a standard input that is no terminal has none."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None
        self._typed = ""

    def __enter__(self) -> Self:
        if sys.stdin.isatty():
            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def pressed(self, within_s: float) -> str:
        """The next key; empty when there was none in this time, GONE when the terminal has."""
        if self._before is None:
            time.sleep(within_s)
            return ""
        if not self._typed:
            self._read(within_s)
        while BEGUN.fullmatch(self._typed) and self._read(REST_S):
            pass
        key = KEY.match(self._typed)
        if key is None:
            return ""
        self._typed = self._typed[key.end() :]
        return key.group()

    def _read(self, within_s: float) -> bool:
        """Whether something came."""
        if not select.select([sys.stdin], [], [], within_s)[0]:
            return False
        read = b""
        with contextlib.suppress(OSError):  # a terminal that was hung up
            read = os.read(sys.stdin.fileno(), READ_BYTES)
        self._typed += read.decode("utf-8", "replace") or GONE
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            with contextlib.suppress(termios.error):  # it is gone
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)
