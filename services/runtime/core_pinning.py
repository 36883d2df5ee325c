"""Pin threads to the cores of the plan, where the system allows it.

The cores that a process may use change while it lives: Android moves background apps to the slow cores and switches
cores off. A thread that cannot be pinned runs wherever the system puts it; that is slower, but it is no error.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

log = logging.getLogger(__name__)
_reported_cores: set[int] = set()  # each core is logged once: prefill pins its thread for every chunk


def pin(core: int | None) -> bool:
    """Pin this thread to a core; None leaves it unpinned. Return False, and change nothing, if the core is
    unavailable."""
    if core is None:
        return True
    try:
        os.sched_setaffinity(0, {core})
    except OSError as error:
        if core not in _reported_cores:
            log.warning("core %d is unavailable (%s): running where the system puts us", core, error.strerror)
            _reported_cores.add(core)
        return False
    return True


@contextlib.contextmanager
def unpinned() -> Iterator[None]:
    """Let this thread, and the threads that it starts, run on every core of the parent process while the context lasts.

    It is for parallel work in a process that is pinned to one core. Where the system forbids it, nothing changes.
    """
    before: set[int] = set()
    with contextlib.suppress(OSError):
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)
