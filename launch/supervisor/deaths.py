"""The deaths of a run's processes: how many of them it bears, and which were a process's own doing."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from pathlib import Path

from neuronpipe.launch.supervisor.replacement import ProcessKey
from neuronpipe.plans.device.process_limits import read_oom_kills

RESTARTS, WITHIN_S = 5, 30.0


class RestartBudget:
    """How often each process may die: RESTARTS times within WITHIN_S. Without clock."""

    def __init__(self, processes: Iterable[ProcessKey]) -> None:
        self._deaths: dict[ProcessKey, deque[float]] = {key: deque() for key in processes}
        self._refused_requests = 0

    def count(self, process: ProcessKey, now: float) -> int | None:
        """Count a death at this time in seconds. Returns how many there were lately where they are too many."""
        deaths = self._deaths[process]
        deaths.append(now)
        while deaths[0] < now - WITHIN_S:
            deaths.popleft()
        return len(deaths) if len(deaths) > RESTARTS else None

    def clear(self, process: ProcessKey) -> None:
        """Another implementation does this process's work now."""
        self._deaths[process].clear()

    def pardon(self, refused_requests: int, replaced: Collection[ProcessKey]) -> None:
        """Forget the deaths whose cause was a request, once it is refused. refused_requests: how many there were so
        far; replaced: processes whose implementation came by `swap`, whose deaths count: the one before it is better.
        """
        if refused_requests != self._refused_requests:
            self._refused_requests = refused_requests
            for process in self._deaths.keys() - replaced:
                self._deaths[process].clear()


class Causes:
    """Tells kills from outside from a process's own doing."""

    def __init__(self) -> None:
        self._oom_kills = read_oom_kills(Path("/"))

    def signal_from_outside(self, code: int) -> int:
        """The signal that ended a process, if somebody may have sent it; 0 where the process ended by its own doing,
        which taking too much memory is. code: of its end, as `os.waitstatus_to_exitcode` has it."""
        before, self._oom_kills = self._oom_kills, read_oom_kills(Path("/"))
        return max(0, -code) if self._oom_kills == before else 0
