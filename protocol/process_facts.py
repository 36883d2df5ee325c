"""Facts about a process from /proc. Importing psutil would cost 15 ms and 1.2 MB in every process.

Other modules use psutil for processor time and sockets of other processes. Its start times are times of day, which
change when the clock is set.
"""

from __future__ import annotations

import mmap
from pathlib import Path


def stat_fields(pid: int | None = None) -> list[str]:
    """Return the fields of /proc/PID/stat after the process name: state, parent, ...; None means this process.

    Raises FileNotFoundError or ProcessLookupError if there is no such process, another OSError if /proc is hidden.
    """
    # The main thread has the same figures. User-mode QEMU invents a /proc/PID/stat for a process that reads its own.
    path = "/proc/self/stat" if pid is None else f"/proc/{pid}/task/{pid}/stat"
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()  # the name may contain blanks and brackets


def state(pid: int) -> str:
    """Return the letter of a process's state, e.g. "T" if a signal stopped it, "t" under a debugger. Raises OSError."""
    return stat_fields(pid)[0]


def parent(pid: int) -> int:
    """Return the id of a process's parent. Raises OSError."""
    return int(stat_fields(pid)[1])


def start_ticks(pid: int | None = None) -> int:
    """Return the start time of a process in clock ticks since boot; None means this process. Raises OSError."""
    return int(stat_fields(pid)[19])


def private_writable_bytes() -> int:
    """Return the size of this process's private writable memory, which RLIMIT_DATA limits. Raises OSError."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * mmap.PAGESIZE
