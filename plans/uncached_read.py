"""Reads files whose bytes a run needs once, without leaving them in the page cache.

The kernel counts the pages of a file that was read as memory of the reading control group, and takes them back only
when the group is at its limit. A run that reports its memory leaves none behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

BLOCK_BYTES = 4 << 20


def forget(descriptor: int, *, length_bytes: int = 0) -> None:
    """Drop the first pages of a file from the page cache, or all of them (0), except pages that are mapped or not yet
    written."""
    if hasattr(os, "posix_fadvise"):  # some phones' Python lacks it
        os.posix_fadvise(descriptor, 0, length_bytes, os.POSIX_FADV_DONTNEED)


def disable_read_ahead(descriptor: int) -> None:
    """Turn off read-ahead: pages that are still being read when a file is forgotten would stay in the cache."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)


def passing(path: Path, into: memoryview | None = None) -> Iterator[memoryview]:
    """Yield the bytes of a file in pieces. Each piece is valid until the next one is requested. The pieces fill `into`
    one after the other, or use a scratch buffer. Raises OSError."""
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
            forget(file.fileno())  # including pages that were read ahead
