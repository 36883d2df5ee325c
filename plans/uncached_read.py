"""Reading of files whose bytes are needed once, without leaving them in the page cache.

The kernel counts the cached pages of a file as memory of the control group that read it, and reclaims them only when
the group is at its limit. Pages that stayed would count as memory of the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

BLOCK_BYTES = 4 << 20


def forget(descriptor: int, *, length_bytes: int = 0) -> None:
    """Drop a file from the page cache. The kernel keeps pages that are mapped, or changed and not yet written.

    length_bytes: only this beginning of the file; 0: the whole file
    """
    if hasattr(os, "posix_fadvise"):  # Python on some phones lacks it; the pages then stay
        os.posix_fadvise(descriptor, 0, length_bytes, os.POSIX_FADV_DONTNEED)


def disable_read_ahead(descriptor: int) -> None:
    """Turn off read-ahead for an open file, before it is read and then passed to `forget`.

    `forget` cannot drop pages that the kernel is still reading ahead.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)


def passing(path: Path, into: memoryview | None = None) -> Iterator[memoryview]:
    """Yield the bytes of a file in pieces of at most BLOCK_BYTES, and drop the file from the page cache.

    A piece is valid until the next one is requested. Raises OSError.

    into: receives the pieces one after the other; reading ends when it is full. None: a buffer that every piece reuses
    """
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
