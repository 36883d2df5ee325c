"""Reading of files whose bytes are needed once, without leaving them in the page cache.

The kernel counts the cached pages of a file as memory of the control group that read it, and reclaims them only when
the group is at its limit. Pages that stayed would count as memory of the run.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
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


def passing(path: Path, targets: Iterable[memoryview] | None = None) -> Iterator[memoryview]:
    """Yield the bytes of a file in pieces of at most BLOCK_BYTES, and drop the file from the page cache.

    A piece is valid until the next one is requested. Raises OSError.

    targets: receive the pieces, one each; reading ends after the last. None: a buffer that every piece reuses
    """
    at = 0
    with path.open("rb", buffering=0) as file:
        try:
            for target in itertools.repeat(memoryview(bytearray(BLOCK_BYTES))) if targets is None else targets:
                filled = 0
                while filled < len(target) and (read := file.readinto(target[filled:])):
                    filled += read
                at += filled
                forget(file.fileno(), length_bytes=at)
                if not filled:
                    return
                with target[:filled] as piece:
                    yield piece
        finally:
            forget(file.fileno())  # including pages that were read ahead
