"""The sign of life of a process's main loop, in memory shared with the watchdog (launch/supervisor/watchdog.py).

A process that waits for work shows an even word, one that works an odd word; each change is a new word. So nobody has
to ask an idle process whether it lives, and a process that works shows that it does not stand still. A program that
does not write its word is taken for one that waits.
"""

from __future__ import annotations

import asyncio
import mmap
import selectors
import time
from typing import Any

WORD_BYTES = 8
_CLOCK_OF_PROCESS = 2  # CPUCLOCK_SCHED, of all its threads


class Pulse:
    """One process's word. The process that it belongs to writes it, nobody else does."""

    def __init__(self, words: memoryview, index: int) -> None:
        self._words, self._index = words, index
        self._word = int(words[index])

    def works(self) -> None:
        """From now on the process works, until it says that it waits."""
        self._word += 1 + self._word % 2
        self._words[self._index] = self._word

    def waits(self) -> None:
        """From now on the process waits for something to do."""
        self._word += self._word % 2
        self._words[self._index] = self._word


def shared_words(count: int) -> memoryview:
    """Words that this process and those that it forks share. Until a process begins, its word is 0: it waits."""
    return memoryview(mmap.mmap(-1, WORD_BYTES * count)).cast("Q")


def unwatched() -> Pulse:
    """A pulse that nobody looks at."""
    return Pulse(memoryview(bytearray(WORD_BYTES)).cast("Q"), 0)


class _ShownSelector(selectors.DefaultSelector):
    """A selector that shows when the event loop waits."""

    def __init__(self, pulse: Pulse) -> None:
        super().__init__()
        self._pulse = pulse

    def select(self, timeout: float | None = None) -> Any:
        """Wait as the selector does."""
        self._pulse.waits()
        try:
            return super().select(timeout)
        finally:
            self._pulse.works()


def event_loop(pulse: Pulse) -> asyncio.AbstractEventLoop:
    """An event loop that shows when it waits for events and when it works on them."""
    return asyncio.SelectorEventLoop(_ShownSelector(pulse))


def processor_time_s(pid: int) -> float:
    """Processor time that a process has used, all threads together. Raises OSError when there is no such process."""
    return time.clock_gettime(~pid << 3 | _CLOCK_OF_PROCESS)
