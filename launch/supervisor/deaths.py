"""The restart budget of a run's processes, and the signals that ended them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from pathlib import Path

from neuronpipe.launch.supervisor.replacement import ProcessKey
from neuronpipe.plans.device.process_limits import read_oom_kills

RESTARTS, WITHIN_S = 5, 30.0


class RestartBudget:
    """Counts deaths: each process may die RESTARTS times within WITHIN_S. The caller passes the time."""

    def __init__(self, processes: Iterable[ProcessKey]) -> None:
        self._deaths: dict[ProcessKey, deque[float]] = {key: deque() for key in processes}
        self._refused_requests = 0

    def count(self, process: ProcessKey, now: float) -> int | None:
        """Count a death at the time `now`, in seconds. Return the number of recent deaths; None within the budget."""
        deaths = self._deaths[process]
        deaths.append(now)
        while deaths[0] < now - WITHIN_S:
            deaths.popleft()
        return len(deaths) if len(deaths) > RESTARTS else None

    def clear(self, process: ProcessKey) -> None:
        """Forget the deaths of a process whose implementation was replaced."""
        self._deaths[process].clear()

    def pardon(self, refused_requests: int, replaced: Collection[ProcessKey]) -> None:
        """Forget all deaths when another request was refused, because that request was their cause.

        refused_requests: the number of refused requests so far
        replaced: processes whose implementation came by `swap`. Their deaths still count, because the previous
            implementation may be better
        """
        if refused_requests != self._refused_requests:
            self._refused_requests = refused_requests
            for process in self._deaths.keys() - replaced:
                self._deaths[process].clear()


class Causes:
    """Determines the signal that ended a process, unless memory was short."""

    def __init__(self) -> None:
        self._oom_kills = read_oom_kills(Path("/"))

    def signal_from_outside(self, code: int) -> int:
        """Return the signal that ended a process; 0 if it exited, or was killed for lack of memory.

        code: the exit code as `os.waitstatus_to_exitcode` returns it

        A kill for lack of memory counts as a crash, because the process took the memory.
        """
        before, self._oom_kills = self._oom_kills, read_oom_kills(Path("/"))
        return max(0, -code) if self._oom_kills == before else 0
