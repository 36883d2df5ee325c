"""A word of shared memory by which the watchdog (launch/supervisor/watchdog.py) sees that a main loop progresses.

The word is even while the process waits for work and odd while it works; each change writes a new value. An idle
process therefore needs no heartbeat, and a working one shows progress. A program that never writes its word counts as
waiting.
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
    """The word of one process, which is its only writer."""

    def __init__(self, words: memoryview, index: int) -> None:
        self._words, self._index = words, index
        self._word = int(words[index])

    def works(self) -> None:
        """Mark the process as working, until `waits` is called."""
        self._word += 1 + self._word % 2
        self._words[self._index] = self._word

    def waits(self) -> None:
        """Mark the process as waiting for work."""
        self._word += self._word % 2
        self._words[self._index] = self._word


def shared_words(count: int) -> memoryview:
    """Return words that this process shares with those that it forks. They begin at 0, which means waiting."""
    return memoryview(mmap.mmap(-1, WORD_BYTES * count)).cast("Q")


def unwatched() -> Pulse:
    return Pulse(memoryview(bytearray(WORD_BYTES)).cast("Q"), 0)


class _PulseSelector(selectors.DefaultSelector):
    """A selector that writes the pulse around each wait of the event loop."""

    def __init__(self, pulse: Pulse) -> None:
        super().__init__()
        self._pulse = pulse

    def select(self, timeout: float | None = None) -> Any:
        self._pulse.waits()
        try:
            return super().select(timeout)
        finally:
            self._pulse.works()


def event_loop(pulse: Pulse) -> asyncio.AbstractEventLoop:
    """Return an event loop whose pulse tells waiting for events from handling them."""
    return asyncio.SelectorEventLoop(_PulseSelector(pulse))


def processor_time_s(pid: int) -> float:
    """Return the processor time of all threads of a process in seconds. Raises OSError if there is no such process."""
    return time.clock_gettime(~pid << 3 | _CLOCK_OF_PROCESS)
