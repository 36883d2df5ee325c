"""How much memory a run takes, as seen from outside: proportional set sizes, so that shared pages count once in the
sum."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path

_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)
LEAST_INTERVAL_S = 0.05
COST_FACTOR = 50  # a sample that takes 10 ms is taken every 500 ms at most
EARLY_S, EARLY_FACTOR = 1.0, 10  # while a run fills up, and for runs that are over soon


def proportional_bytes(pid: int) -> int:
    """Proportional set size of one process; 0 when it is gone or cannot be read."""
    try:
        found = _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_bytes())
    except OSError:
        return 0
    return 1024 * int(found.group(1)) if found else 0


class Footprint:
    """Samples the sum over processes now and then, at a cost of a few percent of one core at most."""

    def __init__(self) -> None:
        self.current_bytes = 0
        self.peak_bytes = 0
        self.due_at = 0.0
        self._began = time.monotonic()

    def sample(self, pids: Iterable[int]) -> None:
        """Take a sample now."""
        before = time.monotonic()
        self.current_bytes = sum(proportional_bytes(pid) for pid in pids)
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        after = time.monotonic()
        factor = EARLY_FACTOR if after - self._began < EARLY_S else COST_FACTOR
        self.due_at = after + max(LEAST_INTERVAL_S, factor * (after - before))
