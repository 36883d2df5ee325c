"""The watchdog: finds processes that do not answer although they have not ended. Their parent kills and replaces them.

    a process that       is overdue after         how it is ended
    a signal has stopped STOPPED_S                SIGKILL
    hangs at its work    HANG_S, or STEP_HANG_S   SIGABRT, which counts as a crash; then SIGKILL

A process hangs if it works (services/runtime/pulse.py) without progress: its pulse does not change, and while a worker
computes a step, no process of the run writes a span of the trace. Only the process's own time counts, so that nothing
is killed because the machine was suspended or is overloaded: for a process that runs or waits for the disk its
processor time, for one that sleeps at most MAX_GAP_S between two looks. A process that a debugger has stopped is left
alone.

While no process works or is stopped, one look per IDLE_LOOK_S is enough: when a child is stopped, the kernel sends
SIGCHLD, and `look` is called at once.
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
class Observation:
    """The state of a process as seen from outside.

    state: the letter in /proc/PID/stat; empty if there is no such process
    cpu_s: processor time that it has used
    works: whether its pulse shows that it is at work
    progress: counters that change when it makes progress
    patience_s: how long it may hang
    """

    state: str
    cpu_s: float
    works: bool
    progress: tuple[int, ...]
    patience_s: float = HANG_S


@dataclasses.dataclass
class _Watched:
    """A process, its last observation, and for how long it has been stopped or has hung."""

    observation: Observation
    stopped_s: float = 0.0
    hung_s: float = 0.0
    aborted: bool = False

    def look(self, observation: Observation, passed_s: float) -> None:
        before, self.observation = self.observation, observation
        gap_s = min(passed_s, MAX_GAP_S)
        stopped = observation.state == before.state == STOPPED
        self.stopped_s = self.stopped_s + gap_s if stopped else 0.0
        if not observation.works or observation.progress != before.progress:
            self.hung_s = 0.0
        elif observation.state == SLEEPING:
            self.hung_s += gap_s
        elif observation.state != STOPPED:
            self.hung_s += max(0.0, observation.cpu_s - before.cpu_s)

    @property
    def is_suspect(self) -> bool:
        return self.observation.state == STOPPED or self.observation.works


@frozen
class Overdue:
    """A process that does not answer, and the reason.

    aborts: whether to end it by SIGABRT instead of SIGKILL
    """

    pid: int
    why: str
    aborts: bool


class Watchdog:
    """Finds overdue processes from observations. The caller passes the time."""

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self._looked_at = -math.inf
        self.due_at = 0.0
        """When to call `look` again, by its clock."""

    def look(self, observations: Mapping[int, Observation], now_s: float) -> list[Overdue]:
        """Return the processes that are overdue. A process that still exists at the next look is overdue again."""
        passed_s = now_s - self._looked_at
        self._looked_at = now_s
        before, self._watched = self._watched, {}
        overdue: list[Overdue] = []
        for pid, observation in observations.items():
            self._watched[pid] = watched = before.get(pid) or _Watched(observation)
            if pid in before:
                watched.look(observation, passed_s)
            if watched.stopped_s >= STOPPED_S:
                overdue.append(Overdue(pid, f"a signal stopped it for {watched.stopped_s:.0f} s", aborts=False))
            elif watched.hung_s >= watched.observation.patience_s:
                why = f"it did not get on with its work for {watched.hung_s:.0f} s"
                overdue.append(Overdue(pid, why, aborts=not watched.aborted))
                watched.aborted = True
        suspects = any(watched.is_suspect for watched in self._watched.values())
        self.due_at = now_s + (LOOK_S if suspects else IDLE_LOOK_S)
        return overdue


def observe(pid: int, word: int, progress: tuple[int, ...] = (), patience_s: float = HANG_S) -> Observation:
    """Observe a process.

    word: its pulse
    progress: further counters that show its progress
    """
    try:
        state = process_facts.state(pid)
        cpu_s = processor_time_s(pid)
    except OSError:  # it has just ended, or /proc is hidden
        return Observation("", 0.0, works=False, progress=())
    return Observation(state, cpu_s, works=word % 2 == 1, progress=(word, *progress), patience_s=patience_s)


def observe_run(words: Mapping[int, tuple[bool, int]], spans: int) -> dict[int, Observation]:
    """Observe the processes of a run.

    words: (whether it computes steps, its pulse) for each process id
    spans: number of spans that the processes of the run have written
    """
    return {
        pid: observe(pid, word, (spans,), STEP_HANG_S) if computes else observe(pid, word)
        for pid, (computes, word) in words.items()
    }
