"""Which processes keep the run waiting: who has not greeted, who is not ready, who owes an answer to a step.

The run stands still while something is awaited and nobody works: every process that could do something sleeps, and
flash reads nothing. That time counts, at most MAX_GAP_S between two looks, so that neither a suspended machine nor one
that loads for minutes makes a process overdue. After SAY_S clients are told what is wrong (`ProcessStatus.note`). A
process that still stands still REPLACE_S after the run was ready is to be replaced, and one that was never ready after
GIVE_UP_S: the supervisor reads that on the board, and the reason in the run directory.

Pure: the service looks at processes, and tells what it saw.
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
WORKS_SHARE = 0.03  # of a core; signs of life take a tenth of that
PARTS = ("trigger", "value")

Phase = Literal["absent", "greeted", "ready"]


@frozen
class Seen:
    """What is seen of a process.

    phase: how far it is with this run
    owes: what it has not answered, in words; empty: nothing
    pid: its process id by the board; 0: there is none at the moment
    cpu_s: processor time that it has used
    counters: the figures of its last beat
    """

    phase: Phase
    owes: str = ""
    pid: int = 0
    cpu_s: float = 0.0
    counters: Mapping[str, float] = dataclasses.field(default_factory=dict)


@frozen
class Delay:
    """How long the run has stood still, and because of whom. reasons: of each process, what it has not done."""

    seconds: float
    reasons: Mapping[ProcessKey, str]
    starting: bool

    def notes(self) -> dict[ProcessKey, str]:
        """What clients are told of processes; empty while it is too early to say."""
        if self.seconds < SAY_S:
            return {}
        return {name: f"{reason} for {self.seconds:.0f} s" for name, reason in self.reasons.items()}

    def overdue(self) -> dict[ProcessKey, str]:
        """The processes that are waited for no longer."""
        return self.notes() if self.seconds >= (GIVE_UP_S if self.starting else REPLACE_S) else {}


class Delays:
    """What was seen before, and for how long nothing has happened since."""

    def __init__(self) -> None:
        self._seen: Mapping[ProcessKey, Seen] = {}
        self._flash_reads = 0
        self._looked_at = 0.0
        self._stood_s = 0.0
        self.delay = Delay(0.0, {}, starting=True)
        self.due_at = 0.0
        """When to look again, by the clock of `look`."""

    def look(self, seen: Mapping[ProcessKey, Seen], flash_reads: int, now_s: float) -> Delay:
        """The delay now. seen: of all processes that take work; flash_reads: how many the loader has made."""
        passed_s, self._looked_at = now_s - self._looked_at, now_s
        before, self._seen = self._seen, seen
        self.due_at = now_s + LOOK_S
        reasons = reasons_to_wait(seen)
        alive = flash_reads != self._flash_reads or any(
            _works(before.get(name), one, passed_s) for name, one in seen.items()
        )
        self._flash_reads = flash_reads
        stays = reasons.keys() == self.delay.reasons.keys()
        self._stood_s = self._stood_s + min(passed_s, MAX_GAP_S) if reasons and stays and not alive else 0.0
        starting = any(one.phase != "ready" for one in seen.values())
        self.delay = Delay(self._stood_s, reasons, starting)
        return self.delay


def _works(before: Seen | None, now: Seen, passed_s: float) -> bool:
    """Whether a process has done something since it was seen last: it came, got on, or used the processor."""
    if before is None or (before.pid, before.phase, before.owes) != (now.pid, now.phase, now.owes):
        return True
    return now.pid == 0 or now.counters.get("in_flight", 0.0) > 0 or now.cpu_s - before.cpu_s > WORKS_SHARE * passed_s


def reasons_to_wait(seen: Mapping[ProcessKey, Seen]) -> dict[ProcessKey, str]:
    """Who is waited for, and for what. Decode and prefill workers greet when the loader has loaded the fixed tensors,
    so that of several that have not greeted only the loader is meant."""
    absent = [name for name, one in seen.items() if one.phase == "absent"]
    if absent:
        loaders = [name for name in absent if name[0] == "loader"]
        return dict.fromkeys(loaders or absent, "has not sent Hello")
    unready = [name for name, one in seen.items() if one.phase != "ready"]
    if unready:
        return dict.fromkeys(unready, "has sent Hello and is not ready")
    owing = {name: f"has not answered {one.owes}" for name, one in seen.items() if one.owes}
    if not owing:
        return {}
    for name, one in seen.items():
        for part in PARTS:
            if name[0] == "loader" and one.counters.get(f"{part}_waiting", 0.0) > 0:
                if one.counters.get(f"{part}_free", 0.0) > 0:
                    return {name: f"has not read the {part} parts that the step needs"}
                return {("cache", 0): f"has granted loader.{name[1]} no slots for the {part} parts it is to read"}
    return owing


def write_reasons(directory: Path, reasons: Mapping[ProcessKey, str], dropped: Mapping[ProcessKey, str]) -> None:
    """Leave the reasons for the supervisor, a line for each process: its name, a tab, and what it has not done.
    dropped: why the last message of a process could not be read."""
    lines = [
        f"{role}.{index}\t{with_dropped(reason, dropped.get((role, index)))}"
        for (role, index), reason in reasons.items()
    ]
    (directory / OVERDUE_FILE).write_text("\n".join(lines), encoding="utf-8")


def with_dropped(note: str, dropped: str | None) -> str:
    """A note, and the last message that was dropped, where there is one."""
    return f"{note}; its last message was dropped: {dropped}" if dropped else note
