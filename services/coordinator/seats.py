"""Who sits where: the processes of the run as the coordinator sees them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

from neuronpipe.protocol.credits import Credits
from neuronpipe.protocol.messages.lifecycle import State

SILENT_AFTER_S = 5.0


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


class Seats:
    """All seats of the plan, by name ("decode-0"), and the credits of those that take work."""

    def __init__(self, seats: Iterable[tuple[str, int, int | None]]) -> None:
        self._seats = {f"{role}-{index}": SeatState(role=role, index=index, core=core) for role, index, core in seats}
        self.credits = Credits()

    def __contains__(self, peer: str) -> bool:
        return peer in self._seats

    def __getitem__(self, peer: str) -> SeatState:
        return self._seats[peer]

    def __iter__(self) -> Iterator[SeatState]:
        return iter(self._seats.values())

    def heard(self, peer: str, now: float) -> SeatState:
        """Note a sign of life."""
        seat = self._seats[peer]
        seat.heard_at = now
        return seat
