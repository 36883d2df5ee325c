"""Seats of a live run that change hands: who is to come, whom they follow, and how far that is.

    draining   the coordinator ends the old process between two steps     starting, when it has gone
    starting   the successor says Hello and Ready                         done, when the coordinator has seated it

A successor that ends before it is ready, or is not ready in time, is followed by the old implementation again. An old
process that does not end in time is killed; the step it held up is run again, as ever.
"""

from __future__ import annotations

import dataclasses
import socket
from typing import Any, Literal

from neuronpipe.services.implementations import SWAPPABLE, Implementation

Seat = tuple[str, int]
MAX_PATIENCE_S = 600.0


@dataclasses.dataclass
class Takeover:
    """One change of seats. guest: who asked, and waits at the door. deadline: of the phase, by the monotonic clock."""

    phases: dict[Seat, Literal["draining", "starting"]]
    before: dict[Seat, Implementation]
    after: dict[Seat, Implementation]
    guest: socket.socket
    patience_s: float
    deadline: float

    @classmethod
    def parse(
        cls, request: dict[str, Any], present: dict[Seat, Implementation], guest: socket.socket, now: float
    ) -> Takeover:
        """From a request at the door. Raises ValueError saying what is wrong with it, UserError for an implementation
        that is written wrongly."""
        names, use, folder = request.get("seats"), request.get("use"), request.get("folder", "/")
        patience_s = request.get("patience_s")
        known = {f"{role}.{index}": (role, index) for role, index in present if role in SWAPPABLE}
        if not isinstance(names, list) or not names or not all(name in known for name in names):
            raise ValueError(f"seats: {names!r} are not some of {', '.join(known)}")
        if not isinstance(patience_s, int | float) or not 0 < patience_s <= MAX_PATIENCE_S:
            raise ValueError(f"patience_s: {patience_s!r} is no time between 0 and {MAX_PATIENCE_S:.0f} s")
        if not (use is None or isinstance(use, str)) or not isinstance(folder, str):
            raise ValueError("use, folder: no text")
        seats = [known[name] for name in names]
        before = {seat: present[seat] for seat in seats}
        after = dict(before) if use is None else dict.fromkeys(seats, Implementation.parse(use, folder))
        return cls(dict.fromkeys(seats, "draining"), before, after, guest, float(patience_s), now + patience_s)

    def old_one_went(self, seat: Seat, now: float) -> Implementation:
        """The seat is free: who is to be started. The time to get ready begins with the last one."""
        self.phases[seat] = "starting"
        self.deadline = now + self.patience_s
        return self.after[seat]
