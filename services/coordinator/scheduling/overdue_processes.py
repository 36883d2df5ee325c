"""Processes that keep the run waiting: those that have not greeted, are not ready, or owe an answer.

The run stands still while it awaits a process, every process sleeps, and no flash reads happen. Each look adds at most
MAX_GAP_S to that time, so that neither a suspended machine nor a slow load makes a process overdue. After SAY_S clients
see the reason (`ProcessStatus.note`). A process is replaced after REPLACE_S, or after GIVE_UP_S if any process is not
ready: the supervisor reads its name on the board and the reason in the run directory.

This module only judges; the service observes the processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.run_directory import OVERDUE_FILE
from neuronpipe.services.coordinator.scheduling.events import ProcessKey

LOOK_S, MAX_GAP_S = 0.5, 1.0
SAY_S, REPLACE_S, GIVE_UP_S = 5.0, 10.0, 30.0
WORKS_SHARE = 0.03  # of a core: a process that uses more works; beats take a tenth of that
PARTS = ("trigger", "value")

Phase = Literal["absent", "greeted", "ready"]


@frozen
class Observation:
    """The state of a process at one look.

    phase: how far its start in this run is
    owes: the answer that is outstanding, in words; empty: none
    pid: its process id on the board; 0: there is none at the moment
    cpu_s: processor time used
    counters: the figures of its last beat
    """

    phase: Phase
    owes: str = ""
    pid: int = 0
    cpu_s: float = 0.0
    counters: Mapping[str, float] = dataclasses.field(default_factory=dict)


@frozen
class Delay:
    """The time for which the run has stood still, and the reason for each process that it awaits.

    starting: True if any process is not ready
    """

    seconds: float
    reasons: Mapping[ProcessKey, str]
    starting: bool

    def notes(self) -> dict[ProcessKey, str]:
        """Return the note on each process that clients see; empty before SAY_S."""
        if self.seconds < SAY_S:
            return {}
        return {name: f"{reason} for {self.seconds:.0f} s" for name, reason in self.reasons.items()}

    def overdue(self) -> dict[ProcessKey, str]:
        """Return the processes that must be replaced, with the reasons."""
        return self.notes() if self.seconds >= (GIVE_UP_S if self.starting else REPLACE_S) else {}


class Delays:
    """The previous observations, and the time for which the run has stood still.

    due_at: when to look again, by the clock of `look`
    """

    def __init__(self) -> None:
        self._observations: Mapping[ProcessKey, Observation] = {}
        self._flash_reads = 0
        self._looked_at = 0.0
        self._stood_s = 0.0
        self.delay = Delay(0.0, {}, starting=True)
        self.due_at = 0.0

    def look(self, observations: Mapping[ProcessKey, Observation], flash_reads: int, now_s: float) -> Delay:
        """Return the delay now.

        observations: those of all processes that take work
        flash_reads: the number of reads so far
        """
        passed_s, self._looked_at = now_s - self._looked_at, now_s
        before, self._observations = self._observations, observations
        self.due_at = now_s + LOOK_S
        reasons = reasons_to_wait(observations)
        alive = flash_reads != self._flash_reads or any(
            _works(before.get(name), process, passed_s) for name, process in observations.items()
        )
        self._flash_reads = flash_reads
        stays = reasons.keys() == self.delay.reasons.keys()
        self._stood_s = self._stood_s + min(passed_s, MAX_GAP_S) if reasons and stays and not alive else 0.0
        starting = any(process.phase != "ready" for process in observations.values())
        self.delay = Delay(self._stood_s, reasons, starting)
        return self.delay


def _works(before: Observation | None, now: Observation, passed_s: float) -> bool:
    """Return True if a process has started, ended, progressed, or used the processor since the previous look."""
    if before is None or (before.pid, before.phase, before.owes) != (now.pid, now.phase, now.owes):
        return True
    return now.pid == 0 or now.counters.get("in_flight", 0.0) > 0 or now.cpu_s - before.cpu_s > WORKS_SHARE * passed_s


def reasons_to_wait(observations: Mapping[ProcessKey, Observation]) -> dict[ProcessKey, str]:
    """Return the processes that the run waits for, with reasons; empty if it waits for none.

    Workers send Hello after the loader has loaded the fixed tensors, so that only the loader is named while it has not
    sent Hello either. If the loader has clusters to read for a step, the loader is named, or the cache if the loader
    has no free slot.
    """
    absent = [name for name, process in observations.items() if process.phase == "absent"]
    if absent:
        loaders = [name for name in absent if name[0] == "loader"]
        return dict.fromkeys(loaders or absent, "has not sent Hello")
    unready = [name for name, process in observations.items() if process.phase != "ready"]
    if unready:
        return dict.fromkeys(unready, "has sent Hello and is not ready")
    owing = {name: f"has not answered {process.owes}" for name, process in observations.items() if process.owes}
    if not owing:
        return {}
    for name, process in observations.items():
        for part in PARTS:
            if name[0] == "loader" and process.counters.get(f"{part}_waiting", 0.0) > 0:
                if process.counters.get(f"{part}_free", 0.0) > 0:
                    return {name: f"has not read the {part} parts that the step needs"}
                return {("cache", 0): f"has granted loader.{name[1]} no slots for the {part} parts it is to read"}
    return owing


def write_reasons(directory: Path, reasons: Mapping[ProcessKey, str], dropped: Mapping[ProcessKey, str]) -> None:
    """Write the reasons to the run directory for the supervisor: a line per process with its name, a tab and the
    reason.

    dropped: the reason why a process's last message could not be read
    """
    lines = [
        f"{role}.{index}\t{with_dropped(reason, dropped.get((role, index)))}"
        for (role, index), reason in reasons.items()
    ]
    (directory / OVERDUE_FILE).write_text("\n".join(lines), encoding="utf-8")


def with_dropped(note: str, dropped: str | None) -> str:
    """Return the note, extended by the reason why the last message was dropped, if one was."""
    return f"{note}; its last message was dropped: {dropped}" if dropped else note
