"""Processes that keep the run waiting, as the coordinator reports on the board
(services/coordinator/scheduling/overdue_processes.py): which are suspected, and which are not started again.

If several processes are reported, foreign implementations are suspected first. A process that was never ready is not
started again, nor one that kept the run waiting OVERDUE_TIMES times within OVERDUE_WITHIN_S. When a request is refused
because it ended processes, this count is cleared for built-in implementations: the request was the cause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path

from neuronpipe.launch.supervisor.replacement import ProcessKey
from neuronpipe.protocol.run_directory import OVERDUE_FILE
from neuronpipe.services.runtime.implementations import Implementation, Implementations
from neuronpipe.services.runtime.run_memory import RunMemory

OVERDUE_TIMES, OVERDUE_WITHIN_S = 3, 120.0
UNKNOWN = "keeps the run waiting"


class Overdue:
    """Reads reports about overdue processes.

    lines: the board's line of each process
    directory: the run directory
    """

    def __init__(self, lines: Mapping[ProcessKey, int], memory: RunMemory, directory: Path) -> None:
        self._lines, self._directory = lines, directory
        self._words, self._ready = memory.view("board", "overdue"), memory.view("board", "ready")
        self._times: dict[ProcessKey, deque[float]] = {key: deque() for key in lines}
        self._refused_requests = 0

    def take(
        self,
        incarnations: Mapping[ProcessKey, int],
        implementations: Mapping[ProcessKey, Implementation],
        replaced: Collection[ProcessKey],
    ) -> dict[ProcessKey, str]:
        """Return the suspects since the last call, and what each has not done.

        replaced: processes that are being replaced, which have a time limit of their own
        """
        reported = [key for key, line in self._lines.items() if self._words[line] == incarnations[key] + 1]
        for key in reported:
            self._words[self._lines[key]] = 0
        reported = [key for key in reported if key not in replaced]
        if not reported:
            return {}
        suspects = [key for key in reported if not _is_built_in(key, implementations)] or reported
        reasons = self._reasons()
        return {key: reasons.get(f"{key[0]}.{key[1]}", UNKNOWN) for key in suspects}

    def is_hopeless(self, key: ProcessKey, now_s: float) -> bool:
        """Return True if a suspect must not be started again. Call it once each time that a process is suspected."""
        times = self._times[key]
        times.append(now_s)
        while times[0] < now_s - OVERDUE_WITHIN_S:
            times.popleft()
        return len(times) >= OVERDUE_TIMES or not self._ready[self._lines[key]]

    def pardon(self, refused_requests: int, implementations: Mapping[ProcessKey, Implementation]) -> None:
        """Forget how often built-in processes were suspected when another request was refused, the possible cause.

        refused_requests: the number of refused requests so far
        """
        if refused_requests != self._refused_requests:
            self._refused_requests = refused_requests
            for key, times in self._times.items():
                if _is_built_in(key, implementations):
                    times.clear()

    def _reasons(self) -> dict[str, str]:
        try:
            lines = (self._directory / OVERDUE_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return {}
        return {name: reason for name, tab, reason in (line.partition("\t") for line in lines) if tab}


def _is_built_in(key: ProcessKey, implementations: Mapping[ProcessKey, Implementation]) -> bool:
    return implementations[key] == Implementations().of(*key)
