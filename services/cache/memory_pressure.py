"""The memory that slots give back while memory is short. It has no files and no clock.

    memory is short       less than the margin is available; or tasks wait for memory, with less than a quarter of it
                          available; or the system swaps the run: slots give back a step at once and then every STEP_S
    memory is plentiful   two margins and a step are available, and hardly any task waited, for CALM_S: slots take back
                          a step, and another every RESTORE_S

The margin is a thirty-second of all memory, at most 64 MiB. A run that `follows` has a margin of a tenth of all memory,
and begins with the slots that this leaves.

The kernel reports the waiting as PSI (`some avg10`: the share of the last ten seconds in which a task waited for
memory), of the control group if it has one, otherwise of the machine.
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
SWAP_BYTES: Final = 1 << 20  # less is start-up memory that a run never uses again
CALM_SHARE: Final = 0.01
STALLED_BELOW: Final = 1 / 4  # if more is available, the tasks wait because of their own control group's limit


class Pressure:
    """The decision how much memory slots give back, from the state of the machine's memory.

    slots_bytes: memory of all slots
    follows: see the module's docstring
    withheld_bytes: memory to give back
    is_changing: True if `withheld_bytes` is about to change, so that `look` must be called again soon
    """

    def __init__(self, slots_bytes: int, *, follows: bool = False) -> None:
        self._slots_bytes, self._follows = slots_bytes, follows
        self._step_bytes = max(1, -(-slots_bytes // STEPS))
        self.withheld_bytes = 0
        self._swaps, self._swapped_bytes = False, 0
        self.is_changing = False
        self._changed_s = -STEP_S
        self._short_s = -CALM_S

    def begin(self, total_bytes: int, available_bytes: int, takes_bytes: int) -> None:
        """Set the first `withheld_bytes`, before the run takes its memory.

        takes_bytes: memory that the run will take
        """
        if self._follows:
            short = takes_bytes - (available_bytes - self._margin(total_bytes))
            self.withheld_bytes = max(0, min(self._slots_bytes, short))

    def swapped(self, swapped_bytes: int) -> None:
        """Record how much of the run is swapped out. Growth counts as short memory even if much seems available,
        since a swapped slot costs more than an absent one."""
        self._swaps = swapped_bytes > self._swapped_bytes + SWAP_BYTES
        self._swapped_bytes = min(swapped_bytes, self._swapped_bytes) if not self._swaps else swapped_bytes

    def look(self, total_bytes: int, available_bytes: int, stalled_share: float, now_s: float) -> int:
        """Update `withheld_bytes` by the state of memory, and return it.

        stalled_share: PSI, 0 to 1
        """
        margin = self._margin(total_bytes)
        stalled = stalled_share >= STALLED_SHARE and available_bytes < STALLED_BELOW * total_bytes
        self.is_changing = False
        if available_bytes < margin or stalled or self._swaps:
            self._short_s = now_s
            self.is_changing = self.withheld_bytes < self._slots_bytes
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
        self.withheld_bytes = max(0, min(self._slots_bytes, self.withheld_bytes + more_bytes))
        self._changed_s = now_s

    def _margin(self, total_bytes: int) -> int:
        if self._follows:
            return int(FOLLOWED_SHARE * total_bytes)
        return min(MAX_MARGIN_BYTES, int(MARGIN_SHARE * total_bytes))
