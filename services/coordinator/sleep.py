"""How long the coordinator may sleep, and when it asks services for beats. Without sockets and clock.

the run is used     requests are under way, a monitor is attached, or not all processes are ready: it looks around
                    every BEAT_S, asks for beats, and tells the supervisor that memory is to be measured
it was used lately  the same for LINGER_S: what was lent is reclaimed, pins follow the number of sequences
it is not used      it sleeps until a message or a signal comes, or IDLE_S is over: keys and values of ended
                    sequences are forgotten after a while
"""

from __future__ import annotations

import math
import signal

BOARD_CHANGED = signal.SIGURG
"""From the supervisor to the coordinator; in the other direction it means that the run is used. A program that does not
handle it is not disturbed."""
BEAT_S = 0.25
LINGER_S = 6.0  # longer than cache.core.SHRINK_AFTER_S and reservation.RELEASE_AFTER_S
STATUS_LINGER_S = 1.0
TELL_SUPERVISOR_S = 1.0
IDLE_S = 60.0


class Wakefulness:
    """Times are in seconds of one clock."""

    def __init__(self) -> None:
        self._used_until_s = self._beats_due_s = self._tell_due_s = -math.inf

    def used(self, now_s: float, linger_s: float = LINGER_S) -> None:
        """The run is used now."""
        self._used_until_s = max(self._used_until_s, now_s + linger_s)

    def patience_s(self, now_s: float) -> float:
        """How long nothing but a message or a signal can give it something to do."""
        return BEAT_S if now_s < self._used_until_s else IDLE_S

    def asks_for_beats(self, now_s: float) -> bool:
        """True when beats are due, which counts as asking for them."""
        if now_s >= self._used_until_s or now_s < self._beats_due_s:
            return False
        self._beats_due_s = now_s + BEAT_S
        return True

    def tells_supervisor(self, now_s: float) -> bool:
        """True when the supervisor is to hear again that the run is used, which counts as telling it."""
        if now_s >= self._used_until_s or now_s < self._tell_due_s:
            return False
        self._tell_due_s = now_s + TELL_SUPERVISOR_S
        return True
