"""Which processes have the run's seats: what they said of themselves, and what the supervisor says on the board."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from neuronpipe.plans.plan.plan import GATEWAY, Compute
from neuronpipe.protocol.credits import Credits
from neuronpipe.protocol.layout import LINE_WORDS
from neuronpipe.protocol.layouts.run import BOARD_WORDS
from neuronpipe.protocol.messages.lifecycle import Hello, State
from neuronpipe.services.coordinator.events import Seat
from neuronpipe.services.memory import RunMemory

SILENT_AFTER_S = 5.0
WITHOUT_SEAT = ("coordinator", GATEWAY)  # they take no work from the coordinator


@dataclasses.dataclass(kw_only=True)
class SeatState:
    """One service: what it said of itself, and when it was last heard."""

    role: str
    index: int
    core: int | None
    pid: int = 0
    incarnation: int = -1  # of the process that said Hello; -1: none
    greeted_at: float = -math.inf
    state: State = "starting"
    step: int = 0
    heard_at: float = 0.0

    @property
    def name(self) -> Seat:
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
        if self.state == "ready" and now - self.heard_at > SILENT_AFTER_S:
            return "silent"
        return self.state


def _is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal or a debugger. Where /proc does not tell, nobody knows."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] in (b"T", b"t")
    except OSError:
        return False


class BoardLine(NamedTuple):
    """What the supervisor says of a process of the run; pid is 0 while there is none."""

    pid: int
    incarnation: int
    restarts: int


class Seats:
    """The seats of those that take work, by their names on the control link, with their credits; and the board, which
    has a line for every process of the run."""

    def __init__(self, compute: Compute, memory: RunMemory) -> None:
        self._lines: dict[Seat, int] = {(seat.role, seat.index): line for line, seat in enumerate(compute.seats)}
        workers = [seat for seat in compute.seats if seat.role not in WITHOUT_SEAT]
        states = [SeatState(role=seat.role, index=seat.index, core=seat.core) for seat in workers]
        self._seats = {state.peer: state for state in states}
        self._board = memory.view("board", "processes")
        self._seated = memory.view("board", "seated")
        self._leaving = memory.view("board", "leaving")
        self._leaving_seen = b""
        self.credits = Credits()

    def __contains__(self, peer: str) -> bool:
        return peer in self._seats

    def __getitem__(self, peer: str) -> SeatState:
        return self._seats[peer]

    def __iter__(self) -> Iterator[SeatState]:
        return iter(self._seats.values())

    # ---- what they say ---------------------------------------------------------------------------------------
    def heard(self, peer: str, now: float) -> SeatState:
        """Note a sign of life."""
        seat = self._seats[peer]
        seat.heard_at = now
        return seat

    def take(self, seat: SeatState, hello: Hello) -> None:
        """A process takes its seat; it is ready when it says so."""
        seat.pid, seat.core, seat.incarnation, seat.state = hello.pid, hello.core, hello.incarnation, "starting"
        self.credits.announce(seat.peer, hello.slots)

    def ready(self, seat: SeatState) -> None:
        """The seat's process is ready: the supervisor reads that on the board."""
        seat.state = "ready"
        self._seated[self._lines[seat.name]] = seat.incarnation + 1

    def leave(self, seat: SeatState) -> None:
        """The seat's process is gone."""
        seat.pid, seat.incarnation, seat.state = 0, -1, "starting"
        self.credits.forget(seat.peer)

    # ---- what the board says ---------------------------------------------------------------------------------
    def line(self, role: str, index: int) -> int:
        """Which line of the board a process has: the plan's order."""
        return self._lines[role, index]

    def on_board(self, role: str, index: int) -> BoardLine:
        """What the supervisor says of a process."""
        at = self._lines[role, index] * LINE_WORDS
        return BoardLine(*self._board[at : at + len(BOARD_WORDS)])

    def lost(self) -> list[SeatState]:
        """The seats whose process is not the board's any more."""
        return [seat for seat in self if seat.incarnation not in (-1, self.on_board(*seat.name).incarnation)]

    def is_leaving(self, role: str, index: int) -> bool:
        """Whether this process is to go, for a successor or with the run."""
        return bool(self._leaving[self._lines[role, index]])

    def new_leaving(self) -> frozenset[Seat] | None:
        """All processes that are to go; None while it is what it was when this was last asked."""
        leaving = self._leaving.tobytes()
        if leaving == self._leaving_seen:
            return None
        self._leaving_seen = leaving
        return frozenset(name for name, line in self._lines.items() if self._leaving[line])
