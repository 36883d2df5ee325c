"""A page on a terminal: single keys without waiting for a line, and the visible part of the page."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from neuronpipe.launch.watch.charts import FAINT
from rich.console import Group, RenderableType
from rich.segment import Segment, Segments
from rich.text import Text

KEY = re.compile(r"\x1b[\[O][0-9;]*[~A-Za-z]|.", re.DOTALL)  # an arrow or the like as the characters it sends, or one
BEGUN = re.compile(r"\x1b([\[O][0-9;]*)?")
KEY_TAIL_S = 0.05  # for the rest of a key that has begun: it may come over a network
READ_BYTES = 64
CLOSED = "q"
LEAVES = "q leaves, the run goes on"
UP, DOWN = ("\x1b[A", "\x1bOA", "k"), ("\x1b[B", "\x1bOB", "j")
PAGE_UP, PAGE_DOWN = ("\x1b[5~", "b"), ("\x1b[6~", " ")


class Keyboard:
    """A context in which keys are read at once. A standard input that is no terminal has no keys."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None
        self._typed = ""

    def __enter__(self) -> Self:
        if sys.stdin.isatty():
            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def pressed(self, within_s: float) -> str:
        """Return the next key; empty if none was pressed in this time, CLOSED if the terminal was closed."""
        if self._before is None:
            time.sleep(within_s)
            return ""
        if not self._typed:
            self._read(within_s)
        while BEGUN.fullmatch(self._typed) and self._read(KEY_TAIL_S):
            pass
        key = KEY.match(self._typed)
        if key is None:
            return ""
        self._typed = self._typed[key.end() :]
        return key.group()

    def _read(self, within_s: float) -> bool:
        if not select.select([sys.stdin], [], [], within_s)[0]:
            return False
        read = b""
        with contextlib.suppress(OSError):  # a terminal that was hung up
            read = os.read(sys.stdin.fileno(), READ_BYTES)
        self._typed += read.decode("utf-8", "replace") or CLOSED
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            with contextlib.suppress(termios.error):  # it is gone
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)


class Pager:
    """The scroll position of a page. Its lines may change each time it is displayed."""

    def __init__(self) -> None:
        self._above = self._max_above = 0  # lines
        self._room = 1

    def visible(self, page: Sequence[Sequence[Segment]], rows: int) -> RenderableType:
        """Return the lines that fit into `rows`, the last of which says how to scroll."""
        self._room = max(1, rows - 1)
        self._max_above = max(0, len(page) - self._room)
        self._above = min(self._above, self._max_above)
        lines = page[self._above : self._above + self._room]
        above, below = self._above, self._max_above - self._above
        hidden = f"; ↑ {above} ↓ {below}" if self._max_above else ""
        ended = [Segments([*line, Segment.line()]) for line in lines]
        return Group(*ended, Text(LEAVES + hidden, FAINT, no_wrap=True, overflow="ellipsis"))

    def move(self, pressed: str) -> bool:
        """Scroll if this key does; return True if the position has changed."""
        step = (pressed in DOWN) - (pressed in UP) + self._room * ((pressed in PAGE_DOWN) - (pressed in PAGE_UP))
        before = self._above
        self._above = min(max(0, before + step), self._max_above)
        return self._above != before
