"""The processes of the run: their messages, the supervisor's board, and the participants of steps."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from neuronpipe.plans.plan.document import ACCELERATOR, BACKEND_ROLES, GATEWAY, Compute
from neuronpipe.protocol import process_facts
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.credits import Credits
from neuronpipe.protocol.errors import Full, Lost
from neuronpipe.protocol.layouts.run import BOARD_WORDS
from neuronpipe.protocol.memory.layout import LINE_WORDS
from neuronpipe.protocol.messages.lifecycle import AskBeat, Hello, State
from neuronpipe.protocol.messages.worker import Prefill, Step
from neuronpipe.services.coordinator.scheduling.events import ProcessKey
from neuronpipe.services.coordinator.scheduling.overdue_processes import (
    Delays,
    Observation,
    Phase,
    with_dropped,
    write_reasons,
)
from neuronpipe.services.runtime.pulse import processor_time_s
from neuronpipe.services.runtime.run_memory import RunMemory

SILENT_AFTER_S = 5.0
PREFILL: ProcessKey = ("prefill", 0)
CACHE: ProcessKey = ("cache", 0)
Participants = tuple[ProcessKey, ...]
TAKE_NO_WORK = ("coordinator", GATEWAY)  # roles to which the coordinator sends no steps


@dataclasses.dataclass(kw_only=True)
class WorkerProcess:
    """The state of a service, from its messages."""

    role: str
    index: int
    core: int | None
    numerics: str = ""
    prompt_cache: bool = False  # it saves and restores KV slots
    drafts: bool = False  # it computes the draft layer of a model
    pid: int = 0
    incarnation: int = -1  # of the process that sent Hello; -1: none
    greeted_at: float = -math.inf
    state: State = "starting"
    step: int = 0
    asked_at: float | None = None  # time of the unanswered request for a beat, in seconds; None: none is unanswered
    counters: dict[str, float] = dataclasses.field(default_factory=dict)  # of its last beat

    @property
    def name(self) -> ProcessKey:
        return self.role, self.index

    @property
    def peer(self) -> str:
        """Name on the control link."""
        return f"{self.role}-{self.index}"

    def verdict(self, now: float, outstanding: int) -> State:
        """Return the state that clients see. A ready process is "silent" if a signal has stopped it, "busy" while it
        owes answers, and "silent" if it has not sent a requested beat for SILENT_AFTER_S.

        outstanding: number of messages that it has not answered
        """
        if self.state == "ready" and _is_stopped(self.pid):
            return "silent"
        if self.state == "ready" and outstanding:
            return "busy"
        if self.state == "ready" and self.asked_at is not None and now - self.asked_at > SILENT_AFTER_S:
            return "silent"
        return self.state


def _is_stopped(pid: int) -> bool:
    """Return True if a signal or a debugger has stopped the process; False if /proc cannot be read."""
    try:
        return process_facts.state(pid) in ("T", "t")
    except OSError:
        return False


class BoardLine(NamedTuple):
    """The supervisor's record of a process.

    pid: 0 while there is no process
    restarts: number of lost incarnations, without replaced ones
    gone: 1 if it will not be started again
    signal: the signal that ended the previous incarnation; 0: it exited or was killed for lack of memory
    """

    pid: int
    incarnation: int
    restarts: int
    gone: int
    signal: int


class WorkerProcesses:
    """The services, by their names on the control link, with their credits; and the board, which has a line for every
    process of the run."""

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
        self._last_leaving = b""
        self.credits = Credits()

    def __contains__(self, peer: str) -> bool:
        return peer in self._processes

    def __getitem__(self, peer: str) -> WorkerProcess:
        return self._processes[peer]

    def __iter__(self) -> Iterator[WorkerProcess]:
        return iter(self._processes.values())

    # ---- messages --------------------------------------------------------------------------------------------
    def heard(self, peer: str) -> WorkerProcess:
        """Note a sign of life, and return the process."""
        process = self._processes[peer]
        process.asked_at = None
        return process

    def ask_for_beats(self, send: Callable[[str, Message], object], now: float) -> None:
        """Request a beat of each process that has no unanswered request.

        send: sends a message to a peer; raises Lost or Full
        """
        for process in self:
            if process.asked_at is not None:
                continue
            process.asked_at = now
            try:
                send(process.peer, AskBeat())
            except (Lost, Full):
                process.asked_at = None  # it is not connected; the board shows when it is lost

    def take(self, process: WorkerProcess, hello: Hello) -> None:
        """Record the incarnation that has sent Hello. It is "starting" until it sends Ready."""
        process.pid, process.core, process.incarnation = hello.pid, hello.core, hello.incarnation
        process.numerics, process.prompt_cache, process.drafts = hello.numerics, hello.prompt_cache, hello.drafts
        process.state = "starting"
        self.credits.announce(process.peer, hello.slots)

    def ready(self, process: WorkerProcess) -> None:
        """Mark the process as ready, also on the board, which the supervisor reads."""
        process.state = "ready"
        self._ready[self._lines[process.name]] = process.incarnation + 1

    def leave(self, process: WorkerProcess) -> None:
        """Reset the state of a process that was lost."""
        process.pid, process.incarnation, process.state, process.asked_at = 0, -1, "starting", None
        process.counters = {}
        self.credits.forget(process.peer)

    # ---- the board -------------------------------------------------------------------------------------------
    def line(self, role: str, index: int) -> int:
        """Return the index of the process's line on the board, which is its index in the plan."""
        return self._lines[role, index]

    def on_board(self, role: str, index: int) -> BoardLine:
        at = self._lines[role, index] * LINE_WORDS
        return BoardLine(*self._board[at : at + len(BOARD_WORDS)])

    def retired(self) -> frozenset[ProcessKey]:
        """Return the processes that are not started again."""
        return frozenset(process.name for process in self if self.on_board(*process.name).gone)

    def lost(self) -> list[WorkerProcess]:
        """Return the processes that have sent Hello and whose incarnation differs from that on the board."""
        return [
            process for process in self if process.incarnation not in (-1, self.on_board(*process.name).incarnation)
        ]

    def is_leaving(self, role: str, index: int) -> bool:
        """Return True if this process must end, because of a successor or with the run."""
        return bool(self._leaving[self._lines[role, index]])

    def accuse(self, names: Iterable[ProcessKey]) -> None:
        """Name these processes on the board as overdue, so that the supervisor replaces them."""
        for name in names:
            self._overdue[self._lines[name]] = self.on_board(*name).incarnation + 1

    def owing_steps(self, step: int) -> dict[ProcessKey, str]:
        """Return the processes that owe an answer, each with the text "step N" for the current step."""
        return {process.name: f"step {step}" for process in self if self.credits.outstanding(process.peer)}

    def observe(self, owed: Mapping[ProcessKey, str]) -> dict[ProcessKey, Observation]:
        """Observe all processes but retired ones.

        owed: the answer that a process owes, in words
        """
        retired = self.retired()
        return {
            process.name: self._observe(process, owed.get(process.name, ""))
            for process in self
            if process.name not in retired
        }

    def _observe(self, process: WorkerProcess, owes: str) -> Observation:
        phase: Phase = "absent" if process.incarnation < 0 else "greeted" if process.state == "starting" else "ready"
        pid, cpu_s = self.on_board(*process.name).pid, 0.0
        if pid:
            with contextlib.suppress(OSError):  # it has just ended
                cpu_s = processor_time_s(pid)
        return Observation(phase, owes, pid, cpu_s, process.counters)

    def by_name(self, by_peer: Mapping[str, str]) -> dict[ProcessKey, str]:
        """Return the mapping with process keys in place of peers. Peers that are no services are dropped."""
        return {process.name: by_peer[process.peer] for process in self if process.peer in by_peer}

    def new_leaving(self) -> frozenset[ProcessKey] | None:
        """Return the processes that must end; None if the set has not changed since the previous call."""
        leaving = self._leaving.tobytes()
        if leaving == self._last_leaving:
            return None
        self._last_leaving = leaving
        return frozenset(name for name, line in self._lines.items() if self._leaving[line])


class DelayWatch:
    """The search for processes that keep the run waiting. Clients see notes on them, and the supervisor replaces them.

    directory: directory of the run, for the reasons that the supervisor reads
    notes: receives the note on each of these processes
    """

    def __init__(self, processes: WorkerProcesses, directory: Path, notes: dict[ProcessKey, str]) -> None:
        self._processes, self._directory, self._notes = processes, directory, notes
        self._delays = Delays()

    def is_due(self, now: float, *, awaits: bool) -> bool:
        """Return True if `look` is to be called now.

        awaits: True if the run awaits something of a process
        """
        return now >= self._delays.due_at and (awaits or bool(self._delays.delay.reasons))

    def look(self, owed: Mapping[ProcessKey, str], dropped: Mapping[str, str], flash_reads: int, now: float) -> None:
        """Update the notes, and have overdue processes replaced.

        owed: the answer that a process owes, in words
        dropped: why a peer's last message could not be read, by peer
        flash_reads: number of the loader's reads so far
        """
        delay = self._delays.look(self._processes.observe(owed), flash_reads, now)
        reasons = self._processes.by_name(dropped)
        self._notes.clear()
        self._notes.update({name: with_dropped(note, reasons.get(name)) for name, note in delay.notes().items()})
        if overdue := delay.overdue():
            write_reasons(self._directory, overdue, reasons)
            self._processes.accuse(overdue)


def why_rejected(process: WorkerProcess, hello: Hello) -> str | None:
    """Return why a process that sent Hello cannot take part in the run; None if it can."""
    if process.role in BACKEND_ROLES and not hello.numerics:
        return f"{process.peer}: Hello.numerics is empty, and it computes steps"
    return None


class Workers:
    """The ready processes of the run, and the choice of participants.

    ready: the ready processes, each with its numerics, which are empty if it computes nothing
    complete: True once all were ready at the same time. No step is sent earlier, so that a process that cannot start is
    noticed
    memory_served: True while the loader and the cache, which every step needs, are ready
    """

    def __init__(self, processes: frozenset[ProcessKey]) -> None:
        self._processes = processes
        self.ready: dict[ProcessKey, str] = {}
        self.complete = self.memory_served = False
        self._decoders: Participants = ()
        self._drafting: set[ProcessKey] = set()

    def all_ready(self, retired: frozenset[ProcessKey] = frozenset()) -> bool:
        """Return True if every process of the plan is ready, apart from retired ones."""
        return self.ready.keys() >= self._processes - retired

    @property
    def has_prefill(self) -> bool:
        return PREFILL in self.ready

    @property
    def prefill_numerics(self) -> str | None:
        """The numerics of prompts; None while there is no prefill worker."""
        return self.ready.get(PREFILL)

    @property
    def can_draft(self) -> bool:
        """True if all workers compute the draft layer of a model that has one: prompts need its keys and values too."""
        return self._drafting.issuperset((*self._decoders, *({PREFILL} & self.ready.keys())))

    def is_ready(self, process: ProcessKey, numerics: str, *, drafts: bool = False) -> None:
        self.ready[process] = numerics
        self._drafting = self._drafting | {process} if drafts else self._drafting - {process}
        self.complete |= self.all_ready()
        self._changed()

    def lost(self, processes: Iterable[ProcessKey]) -> None:
        """Remove processes until they are ready again."""
        for process in processes:
            self.ready.pop(process, None)
        self._changed()

    def _changed(self) -> None:
        served = all(process in self.ready for process in self._processes if process[0] in ("loader", "cache"))
        self.memory_served = self.complete and served
        self._decoders = self._find_decoders()

    def decoders(self) -> Participants:
        """Return the participants of a decode step.

        They are the ready decode workers in the numerics of the first one, and the accelerators that compute blocks for
        these, in the same numerics or in numerics of their own, whose id ends with "+" and the workers' id.
        """
        return self._decoders

    def _find_decoders(self) -> Participants:
        decoders = self._decode_workers()
        accelerators = [process for process in self._accelerators() if decoders and self._follows(process, decoders[0])]
        return (*decoders, *accelerators)

    def _accelerators(self) -> Participants:
        return tuple(sorted(process for process in self.ready if process[0] == ACCELERATOR))

    def _decode_workers(self) -> Participants:
        decoders = sorted(process for process in self.ready if process[0] == "decode")
        return tuple(process for process in decoders if self.ready[process] == self.ready[decoders[0]])

    def _follows(self, accelerator: ProcessKey, decoder: ProcessKey) -> bool:
        return self.ready[accelerator].rpartition("+")[2] == self.ready[decoder]

    def numerics_of(self, participants: Participants) -> str:
        """Return the numerics of a step with these participants: those of the accelerator, if there is one."""
        return self.ready[participants[-1]]

    def participants(self, message: Step | Prefill) -> Participants:
        """Return the ready processes that compute a step, decode or prefill; empty while none is ready."""
        if isinstance(message, Step):
            return self.decoders()
        return (PREFILL,) if PREFILL in self.ready else ()
