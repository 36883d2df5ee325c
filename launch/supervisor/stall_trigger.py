"""A descriptor by which the kernel reports that tasks wait for memory, so that nobody has to look for that (PSI)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

# Some task waited for 0.2 of 2 s; without privileges the window must be a multiple of 2 s.
TRIGGER = b"some 200000 2000000\0"


def open_stall_trigger(files: Iterable[Path]) -> int | None:
    """The descriptor, on which poll reports POLLPRI, of the first of these pressure files that takes a trigger; None
    where none does: on old kernels, and on phones, where only the system may."""
    for path in files:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            os.write(descriptor, TRIGGER)
        except OSError:
            os.close(descriptor)
            continue
        return descriptor
    return None
