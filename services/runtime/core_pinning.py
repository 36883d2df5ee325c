"""Keeping a thread on the core that the plan gave it, where the system lets it.

Which cores a process may use changes while it lives: Android moves apps out of sight to the slow cores, and switches
cores off. Who sits badly is slow; who insisted would be dead.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

log = logging.getLogger(__name__)
_told: set[int] = set()  # once is enough: prompts ask for every stretch of tokens


def pin(core: int | None) -> bool:
    """This thread stays on that core from now on; None: anywhere. False: it is not to be had, and all is as before."""
    if core is None:
        return True
    try:
        os.sched_setaffinity(0, {core})
    except OSError as error:
        if core not in _told:
            log.warning("core %d is not to be had (%s): running where the system puts us", core, error.strerror)
            _told.add(core)
        return False
    return True


@contextlib.contextmanager
def unpinned() -> Iterator[None]:
    """While this lasts, this thread and those that it starts may run wherever the process's parent may: for work of
    several threads in a process that has one core. Where the system does not let them, all stays as it is."""
    before: set[int] = set()
    with contextlib.suppress(OSError):
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)
