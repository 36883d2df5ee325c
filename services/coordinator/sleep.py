"""The times at which the coordinator wakes up and requests beats. This module has no sockets and no clock.

use of the run      behaviour
in use              there are requests, a monitor, or processes that are not ready: the coordinator wakes up every
                    BEAT_S, requests beats, and has the supervisor measure memory
used lately         the same for LINGER_S, in which prefill memory is released and pins follow the number of sequences
not used            it sleeps until a message or a signal comes, at most IDLE_S, so that unused content of KV slots is
                    forgotten
"""

from __future__ import annotations

import math
import signal

BOARD_CHANGED = signal.SIGURG
"""The signal by which the supervisor announces a change of the board, and the coordinator that the run is in use. A
program without a handler ignores it."""
BEAT_S = 0.25
LINGER_S = 6.0  # longer than SHRINK_AFTER_S of the cache and RELEASE_AFTER_S of `kv_reservation`
STATUS_LINGER_S = 1.0
TELL_SUPERVISOR_S = 1.0
IDLE_S = 60.0


class Wakefulness:
    """The schedule of wake-ups. All times are in seconds of one clock."""

    def __init__(self) -> None:
        self._used_until_s = self._beats_due_s = self._tell_due_s = -math.inf

    def used(self, now_s: float, linger_s: float = LINGER_S) -> None:
        """Note that the run is in use now and for `linger_s`."""
        self._used_until_s = max(self._used_until_s, now_s + linger_s)

    def patience_s(self, now_s: float) -> float:
        """Return the seconds that the coordinator may sleep if no message or signal comes."""
        return BEAT_S if now_s < self._used_until_s else IDLE_S

    def asks_for_beats(self, now_s: float) -> bool:
        """Return True if beats are to be requested now; then the next request is due BEAT_S later."""
        if now_s >= self._used_until_s or now_s < self._beats_due_s:
            return False
        self._beats_due_s = now_s + BEAT_S
        return True

    def tells_supervisor(self, now_s: float) -> bool:
        """Return True if BOARD_CHANGED is to be sent to the supervisor now; then the next signal is due
        TELL_SUPERVISOR_S later."""
        if now_s >= self._used_until_s or now_s < self._tell_due_s:
            return False
        self._tell_due_s = now_s + TELL_SUPERVISOR_S
        return True
