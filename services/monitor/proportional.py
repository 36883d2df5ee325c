"""The memory of one process as the kernel accounts for it: what it shares with others counts by its share."""

from __future__ import annotations

import re
from pathlib import Path

_PSS = re.compile(rb"^(Pss|Pss_Shmem):\s+(\d+) kB", re.MULTILINE)


def proportional_bytes(pid: int) -> tuple[int, int | None]:
    """Proportional set size of one process, and how much of it is shared memory (None: before Linux 5.4); zeros when it
    is gone or cannot be read."""
    try:
        sizes = dict(_PSS.findall(Path(f"/proc/{pid}/smaps_rollup").read_bytes()))
    except OSError:
        return 0, 0
    shared = sizes.get(b"Pss_Shmem")
    return 1024 * int(sizes.get(b"Pss", 0)), None if sizes and shared is None else 1024 * int(shared or 0)
