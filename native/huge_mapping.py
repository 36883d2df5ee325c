"""Files mapped as memory at addresses that suit huge pages, which `collapse` makes."""

from __future__ import annotations

import os
import weakref
from typing import Any

from neuronpipe.native import ffi, lib


class HugeMapping:
    """The first `size_bytes` of a file as shared memory, at a multiple of the size of a huge page.

    content: all of it; read-only if the mapping is not writable

    Raises OSError if the file cannot be mapped.
    """

    def __init__(self, file: int, size_bytes: int, *, writable: bool) -> None:
        mapped = lib.np_memory_map(file, size_bytes, writable)
        if mapped == ffi.NULL:
            raise OSError(ffi.errno, os.strerror(ffi.errno))
        # The memory lives as long as any view of it: those that `content` was divided into as well.
        pointer = ffi.gc(mapped, lambda memory: lib.np_memory_unmap(memory, size_bytes))
        self._pointer: weakref.ref[Any] = weakref.ref(pointer)
        content = memoryview(ffi.buffer(pointer, size_bytes))
        self.content: memoryview[int] = content if writable else content.toreadonly()

    def close(self) -> None:
        """Release `content` and unmap the file. Raises BufferError if another object still uses its memory, which is
        unmapped after that object's end."""
        self.content.release()
        if self._pointer() is not None:
            raise BufferError("memory of a mapped file is in use")


def collapse(content: memoryview) -> None:
    """Make huge pages of memory of a writable HugeMapping, where the system makes them. The bytes in it stay the same.
    It takes less time than the page faults that it spares, unless most of the memory was touched before."""
    if len(content):
        with ffi.from_buffer(content, require_writable=True) as memory:
            lib.np_memory_collapse(memory, len(content))
