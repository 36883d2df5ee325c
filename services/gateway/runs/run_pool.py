"""The decision which of several packages have a run, within one memory limit. Pure: no clock, no sockets.

| state | a request for the package |
|---|---|
| `asleep` | waits; the run is started when there is room |
| `starting` | waits until the run is ready |
| `live` | uses the run |
| `leaving` | waits; the run ends after its last request, to make room for another |
| `ending` | waits until the memory of the run is free, and then until a new run is started |

Packages are started in the order in which they were first requested. The least recently used run makes room, one
without requests before one with requests. A run is never ended while a request uses it, so no sequence is aborted, and
no package waits for ever.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

State = Literal["asleep", "starting", "live", "leaving", "ending"]
HOLDS_MEMORY: tuple[State, ...] = ("starting", "live", "leaving", "ending")


class Order(NamedTuple):
    """An order to start or end the run of a package."""

    act: Literal["start", "end"]
    name: str


@dataclasses.dataclass
class _Member:
    takes_bytes: int
    state: State = "asleep"
    users: int = 0
    used_at: float = -math.inf


class RunPool:
    """The packages by name and the state of their runs.

    takes_bytes: memory of each package's run
    limit_bytes: memory limit of all runs
    keep_alive_s: how long an unused run stays
    """

    def __init__(self, takes_bytes: Mapping[str, int], limit_bytes: int, keep_alive_s: float) -> None:
        self._members = {name: _Member(size) for name, size in takes_bytes.items()}
        self._limit_bytes, self._keep_alive_s = limit_bytes, keep_alive_s
        self._requested: list[str] = []

    def state(self, name: str) -> State:
        return self._members[name].state

    # ---- requests ----------------------------------------------------------------------------------------------
    def request(self, name: str) -> None:
        """Note that a request waits for this package's run."""
        if name not in self._requested and self.state(name) in ("asleep", "leaving", "ending"):
            self._requested.append(name)

    def withdraw(self, name: str) -> None:
        """Note that no request waits for this package's run any more."""
        if name in self._requested:
            self._requested.remove(name)

    def acquire(self, name: str) -> None:
        """Note that a request uses this run, which must be live, until `release`."""
        self._members[name].users += 1

    def release(self, name: str, now: float) -> None:
        """Note that a request does not use this run any more."""
        member = self._members[name]
        member.users, member.used_at = member.users - 1, now

    def dismiss(self, name: str) -> bool:
        """Let this package's run end now, whatever keep_alive_s is. Return False if requests use it or wait for it."""
        member = self._members[name]
        if member.users or member.state == "starting" or name in self._requested:
            return False
        if member.state == "live":
            member.state = "leaving"
        return True

    # ---- runs --------------------------------------------------------------------------------------------------
    def starting(self, name: str) -> None:
        self._members[name].state = "starting"
        self.withdraw(name)

    def started(self, name: str, now: float) -> None:
        """Note that this run accepts requests."""
        member = self._members[name]
        member.state, member.used_at = "live", now

    def ended(self, name: str) -> None:
        self._members[name].state = "asleep"

    # ---- orders ------------------------------------------------------------------------------------------------
    def orders(self, now: float) -> list[Order]:
        """Return the orders that are due. Each order is returned once."""
        for member in self._members.values():
            if member.state == "live" and not member.users and now >= member.used_at + self._keep_alive_s:
                member.state = "leaving"
        if self._requested:
            self._make_room(self._requested[0])
        orders = []
        for name, member in self._members.items():
            if member.state == "leaving" and not member.users:
                member.state = "ending"
                orders.append(Order("end", name))
        while self._requested and self._can_start(self._requested[0]):
            orders.append(Order("start", self._requested[0]))
            self.starting(self._requested[0])
        return orders

    def due_at(self) -> float:
        """Return when the next run will have been unused for keep_alive_s; infinite if there is none."""
        idle = [member.used_at for member in self._members.values() if member.state == "live" and not member.users]
        return min(idle, default=math.inf) + self._keep_alive_s

    def unused_for_s(self, name: str, now: float) -> float:
        """Return after which time without requests the run of this package ends."""
        member = self._members[name]
        if member.users or member.state != "live":
            return self._keep_alive_s
        return max(0.0, member.used_at + self._keep_alive_s - now)

    def _make_room(self, name: str) -> None:
        """Mark live runs as leaving until this package's run fits, or no live run is left."""
        if self.state(name) != "asleep":
            return  # its last run is still ending
        missing_bytes = self._members[name].takes_bytes - self._limit_bytes + self._held_bytes(("starting", "live"))
        live = [member for member in self._members.values() if member.state == "live"]
        for member in sorted(live, key=lambda member: (member.users > 0, member.used_at)):
            if missing_bytes <= 0:
                return
            member.state = "leaving"
            missing_bytes -= member.takes_bytes

    def _can_start(self, name: str) -> bool:
        """Return True if a run fits beside the other runs. One that is larger than the limit may run alone."""
        held_bytes = self._held_bytes(HOLDS_MEMORY)
        fits = not held_bytes or held_bytes + self._members[name].takes_bytes <= self._limit_bytes
        return self.state(name) == "asleep" and fits

    def _held_bytes(self, states: Iterable[State]) -> int:
        return sum(member.takes_bytes for member in self._members.values() if member.state in states)
