"""The part of a page that a terminal has room for: a higher one is moved under it, and the last line says so."""

from __future__ import annotations

from collections.abc import Sequence

from neuronpipe.launch.watch.marks import FAINT
from rich.console import Group, RenderableType
from rich.segment import Segment, Segments
from rich.text import Text

LEAVES = "q leaves, the run goes on"
UP, DOWN = ("\x1b[A", "\x1bOA", "k"), ("\x1b[B", "\x1bOB", "j")
PAGE_UP, PAGE_DOWN = ("\x1b[5~", "b"), ("\x1b[6~", " ")


class Window:
    """Where the page is. Its lines may be others each time it is shown."""

    def __init__(self) -> None:
        self._above = self._most_above = 0  # lines
        self._room = 1

    def shown(self, page: Sequence[Sequence[Segment]], rows: int) -> RenderableType:
        """What of the page's lines is seen in so many rows, and how to see the rest."""
        self._room = max(1, rows - 1)
        self._most_above = max(0, len(page) - self._room)
        self._above = min(self._above, self._most_above)
        lines = page[self._above : self._above + self._room]
        above, below = self._above, self._most_above - self._above
        hidden = f"; ↑ {above} ↓ {below}" if self._most_above else ""
        ended = [Segments([*line, Segment.line()]) for line in lines]
        return Group(*ended, Text(LEAVES + hidden, FAINT, no_wrap=True, overflow="ellipsis"))

    def move(self, pressed: str) -> bool:
        """Whether this key moves the page."""
        step = (pressed in DOWN) - (pressed in UP) + self._room * ((pressed in PAGE_DOWN) - (pressed in PAGE_UP))
        before = self._above
        self._above = min(max(0, before + step), self._most_above)
        return self._above != before
