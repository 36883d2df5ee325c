"""How much of their memory slots give back when memory is short, and when they take it again. Without files and clock.

    memory is short       less than the margin is available; or the kernel says that tasks wait for memory, with less
                          than a quarter of it available; or the system swaps the run: slots give a step back, at
                          once and then every STEP_S, until it is not
    memory is there       two margins and a step are available, and nobody waited, for CALM_S: they take a step
                          again, and another every RESTORE_S
    a run that `follows`  keeps a tenth of all memory available instead, and begins with what that leaves

The kernel's word is PSI (`some avg10`: the share of the last ten seconds in which a task waited for memory), of the
control group where it has that, else of the machine.
"""

from __future__ import annotations

from typing import Final

STEPS: Final = 16  # of all slots
STEP_S: Final = 0.5
CALM_S: Final = 5.0
RESTORE_S: Final = 1.0
MARGIN_SHARE, MAX_MARGIN_BYTES = 1 / 32, 64 << 20
FOLLOWED_SHARE: Final = 1 / 10
STALLED_SHARE: Final = 0.1
SWAP_BYTES: Final = 1 << 20  # less is what a run never uses again
CALM_SHARE: Final = 0.01
STALLED_BELOW: Final = 1 / 4  # with more available, who waits is in a control group whose own limit is too small


class Pressure:
    """withheld_bytes: what slots give back now. slots_bytes: of all slots; follows: see the module."""

    def __init__(self, slots_bytes: int, *, follows: bool = False) -> None:
        self._most_bytes, self._follows = slots_bytes, follows
        self._step_bytes = max(1, -(-slots_bytes // STEPS))
        self.withheld_bytes = 0
        self._swaps, self._swapped_bytes = False, 0
        self.is_changing = False  # what is withheld is about to change: look again soon
        self._changed_s = -STEP_S
        self._short_s = -CALM_S

    def begin(self, total_bytes: int, available_bytes: int, takes_bytes: int) -> None:
        """Before the run takes anything: it will take so much."""
        if self._follows:
            short = takes_bytes - (available_bytes - self._margin(total_bytes))
            self.withheld_bytes = max(0, min(self._most_bytes, short))

    def swapped(self, swapped_bytes: int) -> None:
        """So much of the run is swapped out now. More than before is a sign of short memory, also where what is
        available says otherwise: a slot that is swapped costs more than one that is not there."""
        self._swaps = swapped_bytes > self._swapped_bytes + SWAP_BYTES
        self._swapped_bytes = min(swapped_bytes, self._swapped_bytes) if not self._swaps else swapped_bytes

    def look(self, total_bytes: int, available_bytes: int, stalled_share: float, now_s: float) -> int:
        """Take a look; returns what slots are to give back now. stalled_share: what PSI says, 0..1."""
        margin = self._margin(total_bytes)
        stalled = stalled_share >= STALLED_SHARE and available_bytes < STALLED_BELOW * total_bytes
        self.is_changing = False
        if available_bytes < margin or stalled or self._swaps:
            self._short_s = now_s
            self.is_changing = self.withheld_bytes < self._most_bytes
            if now_s - self._changed_s >= STEP_S:
                self._change(self._step_bytes, now_s)
        elif available_bytes < 2 * margin + self._step_bytes or stalled_share > CALM_SHARE:
            self._short_s = now_s
        elif self.withheld_bytes:
            self.is_changing = True
            if now_s - self._short_s >= CALM_S and now_s - self._changed_s >= RESTORE_S:
                self._change(-self._step_bytes, now_s)
        return self.withheld_bytes

    def _change(self, more_bytes: int, now_s: float) -> None:
        self.withheld_bytes = max(0, min(self._most_bytes, self.withheld_bytes + more_bytes))
        self._changed_s = now_s

    def _margin(self, total_bytes: int) -> int:
        if self._follows:
            return int(FOLLOWED_SHARE * total_bytes)
        return min(MAX_MARGIN_BYTES, int(MARGIN_SHARE * total_bytes))
