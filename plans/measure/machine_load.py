"""Load of this machine by other programs, which distorts a measurement.

    processors   /proc/stat: time used by other processes, and stolen by a hypervisor, relative to all time. Interrupts
                 are excluded, since those of our own reads cannot be separated from others.
    storage      /proc/pressure/io: share of the ten seconds before in which some process waited for storage

Phones and containers hide some of these files. An unreadable file counts as no load; then only the spread of a
measurement's repetitions shows the load.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_BUSY_FIELDS, _FIELDS = (0, 1, 2, 7), 8  # user, nice, system, stolen; of user, nice, system, idle, iowait, ...


class MachineLoad:
    """Load of the machine by other programs, during and before a measurement that begins now."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._began = self._ticks()
        self._storage = self._storage_share()

    def processor_share(self) -> float:
        """Return the share of all processor time that other programs used since this object was created, 0..1."""
        if self._began is None or (ticks := self._ticks()) is None:
            return 0.0
        used_ticks, own_ticks, total_ticks = (after - before for before, after in zip(self._began, ticks, strict=True))
        return min(1.0, max(0.0, (used_ticks - own_ticks) / total_ticks)) if total_ticks > 0 else 0.0

    def storage_share(self) -> float:
        """Return the share of time in which some process waited for storage, 0..1.

        It is of the ten seconds before this object was created, since later our own reads would count.
        """
        return self._storage

    def _ticks(self) -> tuple[float, float, float] | None:
        """Return processor ticks: (used by all processes, by this process and its finished children, total).

        None if unreadable.
        """
        match = re.match(r"cpu((?: +\d+)+)", _text(self._root / "proc/stat"))
        numbers = [int(number) for number in match.group(1).split()[:_FIELDS]] if match else []
        if len(numbers) < _FIELDS:
            return None
        times = os.times()
        ticks_per_s = os.sysconf("SC_CLK_TCK")
        used_s = times.user + times.system + times.children_user + times.children_system
        return sum(numbers[n] for n in _BUSY_FIELDS), ticks_per_s * used_s, sum(numbers)

    def _storage_share(self) -> float:
        match = re.match(r"some avg10=([0-9.]+)", _text(self._root / "proc/pressure/io"))
        return min(1.0, float(match.group(1)) / 100) if match else 0.0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
