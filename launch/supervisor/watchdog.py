"""The watchdog: which processes do not answer, though they have not ended. Their parent kills and replaces them.

    a process that       is overdue after         how it is ended
    a signal stopped     STOPPED_S                SIGKILL
    hangs at its work    HANG_S, or STEP_HANG_S   SIGABRT, which counts as a crash; then SIGKILL

A process hangs when it works (services/runtime/pulse.py) and shows no progress: its pulse stays the same, and while a
worker
computes a step, no process of the run writes a span of the trace. Time counts on the process's own terms, so that a
machine that was suspended or is overloaded leads to no kill: of a process that runs or waits for the disk only the
processor time counts that it used, of one that sleeps no more than MAX_GAP_S between two looks. A process that a
debugger has stopped is left alone.

Nothing is looked at more than once in IDLE_LOOK_S seconds while all is well: the kernel reports at once that a child
was stopped (SIGCHLD), and then `look` is called.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from neuronpipe.protocol import process_facts
from neuronpipe.protocol.frozen import frozen
from neuronpipe.services.runtime.pulse import processor_time_s

STOPPED_S, HANG_S, STEP_HANG_S = 5.0, 10.0, 60.0
LOOK_S, IDLE_LOOK_S = 1.0, 5.0
MAX_GAP_S = 2.0
STOPPED, SLEEPING = "T", "S"


@frozen
class Sight:
    """What is seen of a process from outside.

    state: its letter in /proc/PID/stat; empty: there is no such process
    cpu_s: processor time that it has used
    works: whether its pulse says that it works
    progress: whatever changes when it gets on
    patience_s: for how long it may hang
    """

    state: str
    cpu_s: float
    works: bool
    progress: tuple[int, ...]
    patience_s: float = HANG_S


@dataclasses.dataclass
class _Watched:
    """A process, how it looked last, and for how long it has been stopped and has hung."""

    sight: Sight
    stopped_s: float = 0.0
    hung_s: float = 0.0
    aborted: bool = False

    def look(self, sight: Sight, passed_s: float) -> None:
        before, self.sight = self.sight, sight
        gap_s = min(passed_s, MAX_GAP_S)
        stopped = sight.state == before.state == STOPPED
        self.stopped_s = self.stopped_s + gap_s if stopped else 0.0
        if not sight.works or sight.progress != before.progress:
            self.hung_s = 0.0
        elif sight.state == SLEEPING:
            self.hung_s += gap_s
        elif sight.state != STOPPED:
            self.hung_s += max(0.0, sight.cpu_s - before.cpu_s)

    @property
    def is_suspect(self) -> bool:
        return self.sight.state == STOPPED or self.sight.works


@frozen
class Overdue:
    """A process that does not answer. why: what is wrong with it, in words. aborts: SIGABRT ends it, not SIGKILL."""

    pid: int
    why: str
    aborts: bool


class Watchdog:
    """What is known of the processes. It has no clock of its own."""

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self._looked_at = -math.inf
        self.due_at = 0.0
        """When to look again, by the clock of `look`."""

    def look(self, sights: Mapping[int, Sight], now_s: float) -> list[Overdue]:
        """The processes that are overdue now, by what is seen of all of them. A process that is still there a look
        later is overdue again."""
        passed_s = now_s - self._looked_at
        self._looked_at = now_s
        before, self._watched = self._watched, {}
        overdue: list[Overdue] = []
        for pid, sight in sights.items():
            self._watched[pid] = watched = before.get(pid) or _Watched(sight)
            if pid in before:
                watched.look(sight, passed_s)
            if watched.stopped_s >= STOPPED_S:
                overdue.append(Overdue(pid, f"a signal stopped it for {watched.stopped_s:.0f} s", aborts=False))
            elif watched.hung_s >= watched.sight.patience_s:
                why = f"it did not get on with its work for {watched.hung_s:.0f} s"
                overdue.append(Overdue(pid, why, aborts=not watched.aborted))
                watched.aborted = True
        suspects = any(watched.is_suspect for watched in self._watched.values())
        self.due_at = now_s + (LOOK_S if suspects else IDLE_LOOK_S)
        return overdue


def sight_of(pid: int, word: int, progress: tuple[int, ...] = (), patience_s: float = HANG_S) -> Sight:
    """What is seen of a process now. word: its pulse; progress: what else shows that it gets on."""
    try:
        state = process_facts.state(pid)
        cpu_s = processor_time_s(pid)
    except OSError:  # it has just ended, or /proc is hidden: then nobody knows whether it hangs
        return Sight("", 0.0, works=False, progress=())
    return Sight(state, cpu_s, works=word % 2 == 1, progress=(word, *progress), patience_s=patience_s)


def sights_of(words: Mapping[int, tuple[bool, int]], spans: int) -> dict[int, Sight]:
    """What is seen of the processes of a run. words: by process id, whether it computes steps, and its pulse. spans:
    how many the run's processes have written."""
    return {
        pid: sight_of(pid, word, (spans,), STEP_HANG_S) if computes else sight_of(pid, word)
        for pid, (computes, word) in words.items()
    }
