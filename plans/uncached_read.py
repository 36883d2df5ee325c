"""Reading files whose bytes a run needs once: they do not stay in the page cache.

The kernel counts the pages of a file that was read as memory of the control group that read them, and takes them back
only when the group is at its limit. A run that says how much memory it takes leaves none behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

BLOCK_BYTES = 4 << 20


def forget(descriptor: int, *, length_bytes: int = 0) -> None:
    """Take a file's first pages out of the page cache, or all (0): those that nobody has mapped or just written."""
    if hasattr(os, "posix_fadvise"):  # some phones' Python lacks it
        os.posix_fadvise(descriptor, 0, length_bytes, os.POSIX_FADV_DONTNEED)


def read_only_what_is_asked(descriptor: int) -> None:
    """Read nothing ahead: pages that are still on their way when a file is forgotten would come later, and stay."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)


def passing(path: Path, into: memoryview | None = None) -> Iterator[memoryview]:
    """The bytes of a file in pieces, each until the next one is asked for: in `into`, one after the other until that is
    full, or else in memory of their own. Raises OSError."""
    scratch, at = memoryview(bytearray(BLOCK_BYTES if into is None else 0)), 0
    with path.open("rb", buffering=0) as file:
        try:
            while True:
                with scratch[:] if into is None else into[at : at + BLOCK_BYTES] as target:
                    if not (read := file.readinto(target)):
                        return
                    at += read
                    forget(file.fileno(), length_bytes=at)
                    with target[:read] as piece:
                        yield piece
        finally:
            forget(file.fileno())  # and what was read ahead
