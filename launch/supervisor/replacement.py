"""The replacement of processes of a live run: old and new implementations, and the progress of the change.

    draining   the coordinator ends the old process between two steps     starting, when it has ended
    starting   the new process sends Hello and Ready                      done, when the coordinator has welcomed it

If a new process ends before it is ready, or is not ready in time, the old implementation is started again. An old
process that does not end in time is killed; the interrupted step is repeated, as after any death.

All processes of a role change together: decode workers wait for each other in shared memory, and two implementations
may do so at different points.
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
    """One change of processes.

    before, after: the old and the new implementation of each process
    client: the connection that waits for the answer
    patience_s: time limit of each phase
    deadline: end of the current phase (monotonic clock, seconds)
    """

    phases: dict[ProcessKey, Literal["draining", "starting"]]
    before: dict[ProcessKey, Implementation]
    after: dict[ProcessKey, Implementation]
    client: socket.socket
    patience_s: float
    deadline: float

    @classmethod
    def parse(
        cls, request: dict[str, Any], current: dict[ProcessKey, Implementation], client: socket.socket, now: float
    ) -> Replacement:
        """Parse a request of the control socket.

        current: the current implementations

        Raises ValueError for an invalid request, UserError for an invalid implementation.
        """
        names, use, folder = request.get("processes"), request.get("use"), request.get("folder", "/")
        patience_s = request.get("patience_s")
        by_name = {f"{role}.{index}": (role, index) for role, index in current if role in SWAPPABLE}
        if not isinstance(names, list) or not names or not all(name in by_name for name in names):
            raise ValueError(f"processes: {quoted(names)} are not some of {', '.join(by_name)}")
        if not isinstance(patience_s, int | float) or not 0 < patience_s <= MAX_PATIENCE_S:
            raise ValueError(f"patience_s: {quoted(patience_s)} is not between 0 and {MAX_PATIENCE_S:.0f} s")
        if not (use is None or isinstance(use, str)) or not isinstance(folder, str):
            raise ValueError("use, folder: expected text")
        keys = [by_name[name] for name in names]
        before = {key: current[key] for key in keys}
        after = dict(before) if use is None else dict.fromkeys(keys, Implementation.parse(use, folder))
        return cls(dict.fromkeys(keys, "draining"), before, after, client, float(patience_s), now + patience_s)

    def old_process_ended(self, key: ProcessKey, now: float) -> Implementation:
        """Return the implementation to start now. The time to get ready is counted from the last old process's end."""
        self.phases[key] = "starting"
        self.deadline = now + self.patience_s
        return self.after[key]
