"""Replacing processes of a live run: which implementation comes, which one goes, and how far the change is.

    draining   the coordinator ends the old process between two steps     starting, when it has gone
    starting   the new process says Hello and Ready                       done, when the coordinator has welcomed it

When a new process ends before it is ready, or is not ready in time, the old implementation is started again. An old
process that does not end in time is killed; the step it held up is run again, as ever.
"""

from __future__ import annotations

import dataclasses
import socket
from typing import Any, Literal

from neuronpipe.protocol.errors import quoted
from neuronpipe.services.runtime.implementations import SWAPPABLE, Implementation

ProcessKey = tuple[str, int]
"""Role and index."""
MAX_PATIENCE_S = 600.0


@dataclasses.dataclass
class Replacement:
    """One change of processes. client: the connection that waits for the answer. deadline: of the phase, by the
    monotonic clock."""

    phases: dict[ProcessKey, Literal["draining", "starting"]]
    before: dict[ProcessKey, Implementation]
    after: dict[ProcessKey, Implementation]
    client: socket.socket
    patience_s: float
    deadline: float

    @classmethod
    def parse(
        cls, request: dict[str, Any], present: dict[ProcessKey, Implementation], client: socket.socket, now: float
    ) -> Replacement:
        """From a request at the control socket. Raises ValueError saying what is wrong with it, UserError for an
        implementation that is written wrongly."""
        names, use, folder = request.get("processes"), request.get("use"), request.get("folder", "/")
        patience_s = request.get("patience_s")
        known = {f"{role}.{index}": (role, index) for role, index in present if role in SWAPPABLE}
        if not isinstance(names, list) or not names or not all(name in known for name in names):
            raise ValueError(f"processes: {quoted(names)} are not some of {', '.join(known)}")
        if not isinstance(patience_s, int | float) or not 0 < patience_s <= MAX_PATIENCE_S:
            raise ValueError(f"patience_s: {quoted(patience_s)} is no time between 0 and {MAX_PATIENCE_S:.0f} s")
        if not (use is None or isinstance(use, str)) or not isinstance(folder, str):
            raise ValueError("use, folder: no text")
        keys = [known[name] for name in names]
        before = {key: present[key] for key in keys}
        after = dict(before) if use is None else dict.fromkeys(keys, Implementation.parse(use, folder))
        return cls(dict.fromkeys(keys, "draining"), before, after, client, float(patience_s), now + patience_s)

    def old_process_ended(self, key: ProcessKey, now: float) -> Implementation:
        """What is to be started now. The time to get ready begins with the last one that ended."""
        self.phases[key] = "starting"
        self.deadline = now + self.patience_s
        return self.after[key]
