"""The processes of the run: what they said of themselves, what the supervisor says of them on the board, and who takes
part in steps."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from neuronpipe.plans.plan.document import ACCELERATOR, BACKEND_ROLES, GATEWAY, Compute
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.credits import Credits
from neuronpipe.protocol.errors import Full, Lost
from neuronpipe.protocol.layout import LINE_WORDS
from neuronpipe.protocol.layouts.run import BOARD_WORDS
from neuronpipe.protocol.messages.lifecycle import AskBeat, Hello, State
from neuronpipe.protocol.messages.worker import Prefill, Step
from neuronpipe.services.coordinator.scheduling.events import ProcessKey
from neuronpipe.services.coordinator.scheduling.overdue_processes import (
    Delays,
    Phase,
    Seen,
    with_dropped,
    write_reasons,
)
from neuronpipe.services.runtime.pulse import processor_time_s
from neuronpipe.services.runtime.run_memory import RunMemory

SILENT_AFTER_S = 5.0
PREFILL: ProcessKey = ("prefill", 0)
CACHE: ProcessKey = ("cache", 0)
Participants = tuple[ProcessKey, ...]
TAKE_NO_WORK = ("coordinator", GATEWAY)  # they take no work from the coordinator


@dataclasses.dataclass(kw_only=True)
class WorkerProcess:
    """One service: what it said of itself, and whether it owes a beat."""

    role: str
    index: int
    core: int | None
    numerics: str = ""
    pid: int = 0
    incarnation: int = -1  # of the process that said Hello; -1: none
    greeted_at: float = -math.inf
    state: State = "starting"
    step: int = 0
    asked_at: float | None = None  # when the beat was asked for that has not come yet
    counters: dict[str, float] = dataclasses.field(default_factory=dict)  # of its last beat

    @property
    def name(self) -> ProcessKey:
        """(role, index)"""
        return self.role, self.index

    @property
    def peer(self) -> str:
        """Its name on the control link."""
        return f"{self.role}-{self.index}"

    def verdict(self, now: float, outstanding: int) -> State:
        """Its state, or "silent" when it neither works nor beats: one that owes an answer may compute for long, unless
        somebody has stopped it."""
        if self.state == "ready" and _is_stopped(self.pid):
            return "silent"
        if self.state == "ready" and outstanding:
            return "busy"
        if self.state == "ready" and self.asked_at is not None and now - self.asked_at > SILENT_AFTER_S:
            return "silent"
        return self.state


def _is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal or a debugger; False where /proc cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] in (b"T", b"t")
    except OSError:
        return False


class BoardLine(NamedTuple):
    """What the supervisor says of a process of the run; pid is 0 while there is none. gone: 1 when there will
    be none; signal: what ended the incarnation before, 0 for its own doing."""

    pid: int
    incarnation: int
    restarts: int
    gone: int
    signal: int


class WorkerProcesses:
    """The processes that take work, by their names on the control link, with their credits; and the board, which has a
    line for every process of the run."""

    def __init__(self, compute: Compute, memory: RunMemory) -> None:
        self._lines: dict[ProcessKey, int] = {
            (process.role, process.index): line for line, process in enumerate(compute.processes)
        }
        workers = [process for process in compute.processes if process.role not in TAKE_NO_WORK]
        states = [WorkerProcess(role=process.role, index=process.index, core=process.core) for process in workers]
        self._processes = {state.peer: state for state in states}
        self._board = memory.view("board", "processes")
        self._ready = memory.view("board", "ready")
        self._leaving = memory.view("board", "leaving")
        self._overdue = memory.view("board", "overdue")
        self._leaving_seen = b""
        self.credits = Credits()

    def __contains__(self, peer: str) -> bool:
        return peer in self._processes

    def __getitem__(self, peer: str) -> WorkerProcess:
        return self._processes[peer]

    def __iter__(self) -> Iterator[WorkerProcess]:
        return iter(self._processes.values())

    # ---- what they say ---------------------------------------------------------------------------------------
    def heard(self, peer: str) -> WorkerProcess:
        """Note a sign of life."""
        process = self._processes[peer]
        process.asked_at = None
        return process

    def ask_for_beats(self, send: Callable[[str, Message], object], now: float) -> None:
        """Ask those for a beat that do not owe one; send raises Lost or Full."""
        for process in self:
            if process.asked_at is not None:
                continue
            process.asked_at = now
            try:
                send(process.peer, AskBeat())
            except (Lost, Full):
                process.asked_at = None  # it is not connected, or not any more: the board says so

    def take(self, process: WorkerProcess, hello: Hello) -> None:
        """An incarnation says Hello; it is ready when it says so."""
        process.pid, process.core, process.incarnation = hello.pid, hello.core, hello.incarnation
        process.numerics, process.state = hello.numerics, "starting"
        self.credits.announce(process.peer, hello.slots)

    def ready(self, process: WorkerProcess) -> None:
        """It is ready: the supervisor reads that on the board."""
        process.state = "ready"
        self._ready[self._lines[process.name]] = process.incarnation + 1

    def leave(self, process: WorkerProcess) -> None:
        """It is gone."""
        process.pid, process.incarnation, process.state, process.asked_at = 0, -1, "starting", None
        process.counters = {}
        self.credits.forget(process.peer)

    # ---- what the board says ---------------------------------------------------------------------------------
    def line(self, role: str, index: int) -> int:
        """Which line of the board a process has: the plan's order."""
        return self._lines[role, index]

    def on_board(self, role: str, index: int) -> BoardLine:
        """What the supervisor says of a process."""
        at = self._lines[role, index] * LINE_WORDS
        return BoardLine(*self._board[at : at + len(BOARD_WORDS)])

    def gone(self) -> frozenset[ProcessKey]:
        """Those that are not started again."""
        return frozenset(process.name for process in self if self.on_board(*process.name).gone)

    def lost(self) -> list[WorkerProcess]:
        """The processes whose incarnation is not the board's any more."""
        return [
            process for process in self if process.incarnation not in (-1, self.on_board(*process.name).incarnation)
        ]

    def is_leaving(self, role: str, index: int) -> bool:
        """Whether this process is to go, for a successor or with the run."""
        return bool(self._leaving[self._lines[role, index]])

    def accuse(self, names: Iterable[ProcessKey]) -> None:
        """Have the supervisor replace these: they keep the run waiting."""
        for name in names:
            self._overdue[self._lines[name]] = self.on_board(*name).incarnation + 1

    def owing_steps(self, step: int) -> dict[ProcessKey, str]:
        """The processes that have not answered the step with this number."""
        return {process.name: f"step {step}" for process in self if self.credits.outstanding(process.peer)}

    def seen(self, owed: Mapping[ProcessKey, str]) -> dict[ProcessKey, Seen]:
        """What is seen of all that are not gone. owed: what they have not answered, in words."""
        gone = self.gone()
        return {one.name: self._seen(one, owed.get(one.name, "")) for one in self if one.name not in gone}

    def _seen(self, process: WorkerProcess, owes: str) -> Seen:
        phase: Phase = "absent" if process.incarnation < 0 else "greeted" if process.state == "starting" else "ready"
        pid, cpu_s = self.on_board(*process.name).pid, 0.0
        if pid:
            with contextlib.suppress(OSError):  # it has just ended
                cpu_s = processor_time_s(pid)
        return Seen(phase, owes, pid, cpu_s, process.counters)

    def by_name(self, by_peer: Mapping[str, str]) -> dict[ProcessKey, str]:
        """The same by the names of processes; of other peers nothing."""
        return {process.name: by_peer[process.peer] for process in self if process.peer in by_peer}

    def new_leaving(self) -> frozenset[ProcessKey] | None:
        """All processes that are to go; None while it is what it was when this was last asked."""
        leaving = self._leaving.tobytes()
        if leaving == self._leaving_seen:
            return None
        self._leaving_seen = leaving
        return frozenset(name for name, line in self._lines.items() if self._leaving[line])


class DelayWatch:
    """Looks for processes that keep the run waiting, says so in `notes`, and has the supervisor replace them.

    directory: the run's; notes: gets what clients are told of processes
    """

    def __init__(self, processes: WorkerProcesses, directory: Path, notes: dict[ProcessKey, str]) -> None:
        self._processes, self._directory, self._notes = processes, directory, notes
        self._delays = Delays()

    def is_due(self, now: float, *, awaits: bool) -> bool:
        """Whether to look now. awaits: whether anything is awaited of a process."""
        return now >= self._delays.due_at and (awaits or bool(self._delays.delay.reasons))

    def look(self, owed: Mapping[ProcessKey, str], dropped: Mapping[str, str], flash_reads: int, now: float) -> None:
        """owed: what processes have not answered. dropped: why the last message of a peer could not be read."""
        delay = self._delays.look(self._processes.seen(owed), flash_reads, now)
        reasons = self._processes.by_name(dropped)
        self._notes.clear()
        self._notes.update({name: with_dropped(note, reasons.get(name)) for name, note in delay.notes().items()})
        if overdue := delay.overdue():
            write_reasons(self._directory, overdue, reasons)
            self._processes.accuse(overdue)


def why_rejected(process: WorkerProcess, hello: Hello) -> str | None:
    """Return why a process cannot take part in the run, by its Hello; None if it can."""
    if process.role in BACKEND_ROLES and not hello.numerics:
        return f"{process.peer}: Hello.numerics is empty, and it computes steps"
    return None


class Workers:
    """The processes of the run that are ready, and who of them can take part in a step.

    ready: by process the numerics in which it computes; empty for who computes nothing
    complete: whether all were ready at once; before that no step is sent, so that one that cannot start is noticed
    memory_served: whether those are ready without whom no step can be computed: loader and cache
    """

    def __init__(self, processes: frozenset[ProcessKey]) -> None:
        self._processes = processes
        self.ready: dict[ProcessKey, str] = {}
        self.complete = self.memory_served = False
        self._decoders: Participants = ()

    def all_ready(self, gone: frozenset[ProcessKey] = frozenset()) -> bool:
        """Whether every process of the plan is ready, but for those that do not come back."""
        return self.ready.keys() >= self._processes - gone

    @property
    def has_prefill(self) -> bool:
        """True if the prefill worker is ready."""
        return PREFILL in self.ready

    @property
    def prefill_numerics(self) -> str | None:
        """In which numerics prompts are computed; None while they cannot be."""
        return self.ready.get(PREFILL)

    def is_ready(self, process: ProcessKey, numerics: str) -> None:
        """It takes part from now on."""
        self.ready[process] = numerics
        self.complete |= self.all_ready()
        self._changed()

    def lost(self, processes: Iterable[ProcessKey]) -> None:
        """They take part in nothing before they are ready again."""
        for process in processes:
            self.ready.pop(process, None)
        self._changed()

    def _changed(self) -> None:
        """What every step asks for is found once."""
        served = all(one in self.ready for one in self._processes if one[0] in ("loader", "cache"))
        self.memory_served = self.complete and served
        self._decoders = self._find_decoders()

    def decoders(self) -> Participants:
        """The participants of a decode step: the ready decode workers in one numerics, that of the first, and whoever
        holds blocks for them: in theirs, or in numerics of its own that end with "+" and theirs."""
        return self._decoders

    def _find_decoders(self) -> Participants:
        decoders = self._decode_workers()
        return (*decoders, *(one for one in self._holders() if decoders and self._follows(one, decoders[0])))

    def _holders(self) -> Participants:
        return tuple(sorted(one for one in self.ready if one[0] == ACCELERATOR))

    def _decode_workers(self) -> Participants:
        decoders = sorted(process for process in self.ready if process[0] == "decode")
        return tuple(one for one in decoders if self.ready[one] == self.ready[decoders[0]])

    def _follows(self, holder: ProcessKey, decoder: ProcessKey) -> bool:
        return self.ready[holder].rpartition("+")[2] == self.ready[decoder]

    def numerics_of(self, participants: Participants) -> str:
        """In which numerics these compute a step together: an accelerator's, if one of them is."""
        return self.ready[participants[-1]]

    def participants(self, message: Step | Prefill) -> Participants:
        """Who can compute a step of this kind now; nobody, while they are being started."""
        if isinstance(message, Step):
            return self.decoders()
        return (PREFILL,) if PREFILL in self.ready else ()
