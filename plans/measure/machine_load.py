"""How busy other programs keep this machine while something is measured, and so distort the figures.

    processors   /proc/stat: time that others had, and that a hypervisor gave to other machines, over all the time
                 there was. Interrupts are left out: those of our own reads cannot be told from others.
    storage      /proc/pressure/io: share of the last ten seconds in which some process waited for it, before we began

Phones and containers hide some of these. What cannot be read counts as quiet, and only the spread of a
measurement's repetitions shows it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_BUSY_FIELDS, _FIELDS = (0, 1, 2, 7), 8  # user, nice, system, stolen; of user, nice, system, idle, iowait, ...


class MachineLoad:
    """Begins to look when it is made."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._began = self._ticks()
        self._storage = self._storage_share()

    def processor_share(self) -> float:
        """Share of all processor time since then that other programs had, 0..1."""
        if self._began is None or (now := self._ticks()) is None:
            return 0.0
        busy, own, total = (after - before for before, after in zip(self._began, now, strict=True))
        return min(1.0, max(0.0, (busy - own) / total)) if total > 0 else 0.0

    def storage_share(self) -> float:
        """Share of the time before that in which somebody waited for storage, 0..1."""
        return self._storage

    def _ticks(self) -> tuple[float, float, float] | None:
        """(used by anybody, used by this process, all there was)."""
        found = re.match(r"cpu((?: +\d+)+)", _text(self._root / "proc/stat"))
        numbers = [int(number) for number in found.group(1).split()[:_FIELDS]] if found else []
        if len(numbers) < _FIELDS:
            return None
        own = os.times()
        ticks_per_s = os.sysconf("SC_CLK_TCK")
        used_s = own.user + own.system + own.children_user + own.children_system  # of children that have ended
        return sum(numbers[n] for n in _BUSY_FIELDS), ticks_per_s * used_s, sum(numbers)

    def _storage_share(self) -> float:
        found = re.match(r"some avg10=([0-9.]+)", _text(self._root / "proc/pressure/io"))
        return min(1.0, float(found.group(1)) / 100) if found else 0.0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
