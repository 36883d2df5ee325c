"""Shared segments: anonymous memory files with a header page, and their mappings.

The supervisor creates all segments and keeps their descriptors, so that no worker's death loses one. Children inherit
descriptors; other processes open them through /proc/<pid>/fd/<n>. A process that may only read gets a descriptor that
cannot be mapped for writing.

    header page, little-endian, the rest zero
    offset  bytes  what
         0      8  magic "NPSEG1" and two zero bytes
         8      4  version of this header, 1
        12      4  kind of segment
        16      4  generation: distinguishes several segments of this kind
        20      4  fingerprint of the layout (CRC-32 of its text)
        24      8  total bytes, this page included
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Protocol, Self

from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.memory.layout import Layout

MAGIC = b"NPSEG1\0\0"
HEADER_VERSION = 1
_HEADER = struct.Struct("<8sIIIIQ")

_FORMATS: dict[str, Any] = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "f32": "f"}

# From linux/fcntl.h and linux/memfd.h: Python lacks them if its C library is older than the kernel.
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_WRITE = 1, 2, 4, 8
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279, "armv7l": 385, "armv8l": 385, "riscv64": 279}


class Closing(ABC):
    """An object that must be closed, with `close` or at the end of a `with` block."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Release the resource; it must not be used any more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


BLOCK_BYTES = 512  # the unit of st_blocks


@frozen(slots=True)
class Segment(Closing):
    """A descriptor of a segment whose header was checked against a layout. It is not mapped yet: see `map`."""

    layout: Layout
    fd: int
    generation: int

    @classmethod
    def create(cls, layout: Layout, generation: int = 1) -> Segment:
        """Create a zeroed segment of fixed size. Raises UserError if memory is short."""
        fd = create_memory_file(layout.name)
        try:
            os.ftruncate(fd, layout.total_bytes)
            header = _HEADER.pack(
                MAGIC, HEADER_VERSION, layout.kind, generation, layout.fingerprint, layout.total_bytes
            )
            os.pwrite(fd, header, 0)
            # A file that shrinks under a reader's mapping would kill the reader.
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW)
        except OSError as error:
            os.close(fd)
            raise UserError(
                f"segment {layout.name}: cannot make {layout.total_bytes} bytes: {error.strerror}; "
                "plan with a smaller memory limit"
            ) from error
        return cls(layout, fd, generation)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the segment that are in memory. A page is allocated when it is first written."""
        return BLOCK_BYTES * os.fstat(self.fd).st_blocks

    @classmethod
    def attach(cls, layout: Layout, fd: int, generation: int | None = None) -> Segment:
        """Return the segment of an inherited descriptor. Raises UserError if it does not have this layout, or this
        generation if one is given."""
        header = os.pread(fd, _HEADER.size, 0)
        if len(header) < _HEADER.size or header[: len(MAGIC)] != MAGIC:
            raise UserError(f"segment {layout.name}: descriptor {fd} is no segment; start the run again")
        _, version, kind, found_generation, fingerprint, total_bytes = _HEADER.unpack(header)
        checks: tuple[tuple[str, int, int], ...] = (
            ("version", version, HEADER_VERSION),
            ("kind", kind, layout.kind),
            ("total bytes", total_bytes, layout.total_bytes),
            ("layout", fingerprint, layout.fingerprint),
            ("size of the file", os.fstat(fd).st_size, layout.total_bytes),
            ("generation", found_generation, found_generation if generation is None else generation),
        )
        for what, actual, expected in checks:
            if actual != expected:
                raise UserError(
                    f"segment {layout.name}: {what}: found {actual}, expected {expected}; start the run again"
                )
        return cls(layout, fd, found_generation)

    @classmethod
    def open(cls, layout: Layout, pid: int, fd: int, *, writable: bool = False) -> Segment:
        """Open the segment that process `pid` has as descriptor `fd`. Raises UserError if it cannot be opened."""
        path = f"/proc/{pid}/fd/{fd}"
        try:
            opened = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"segment {layout.name}: {path}: {error.strerror}; is the run still live?") from error
        try:
            return cls.attach(layout, opened)
        except UserError:
            os.close(opened)
            raise

    def read_only(self) -> Segment:
        """Return the same segment with a new descriptor that cannot be mapped for writing, for readers."""
        return Segment(self.layout, os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC), self.generation)

    def seal(self) -> None:
        """Make the content final: no process can write it any more, whatever descriptor it has. Raises RuntimeError
        while any process has a writable mapping."""
        try:
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEAL_WRITE | _SEAL_SEAL)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            raise RuntimeError(f"segment {self.layout.name}: cannot be sealed while it is mapped for writing") from None

    @property
    def sealed(self) -> bool:
        """Return True once `seal` was called."""
        return bool(fcntl.fcntl(self.fd, _F_GET_SEALS) & _SEAL_WRITE)

    def map(self, *, writable: bool = False, mapper: Mapper | None = None) -> Mapping:
        """Map the whole segment. Raises PermissionError for a writable mapping if the descriptor is read-only or the
        segment sealed.

        mapper: maps the file, e.g. at a certain address; None: Python's mmap
        """
        return Mapping(self, writable, mapper or _PlainMapping)

    def close(self) -> None:
        """Close the descriptor. Mappings stay."""
        os.close(self.fd)


class MappedFile(Protocol):
    """A file as shared memory. `close` unmaps it, or raises BufferError while its memory is in use."""

    content: memoryview[Any]

    def close(self) -> None: ...


class Mapper(Protocol):
    """Maps the first `size_bytes` of a descriptor's file."""

    def __call__(self, file: int, size_bytes: int, *, writable: bool) -> MappedFile: ...


class _PlainMapping:
    def __init__(self, file: int, size_bytes: int, *, writable: bool) -> None:
        self._memory = mmap.mmap(file, size_bytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        self.content = memoryview(self._memory)

    def close(self) -> None:
        self.content.release()
        self._memory.close()


class Mapping(Closing):
    """A mapped segment. `view` returns its fields as flat memoryviews, which are valid until `close`."""

    def __init__(self, segment: Segment, writable: bool, mapper: Mapper) -> None:
        self.layout = segment.layout
        self.writable = writable
        if writable:
            self._memory = mapper(segment.fd, self.layout.total_bytes, writable=True)
        else:
            # Kernels before 6.7 count any mapping of a writable descriptor as writable, and refuse to seal then.
            with segment.read_only() as reader:
                self._memory = mapper(reader.fd, self.layout.total_bytes, writable=False)
        self._views: list[memoryview[Any]] = [self._memory.content]

    @property
    def content(self) -> memoryview[Any]:
        """All bytes of the segment, while the mapping is open."""
        return self._views[0]

    def view(self, name: str) -> memoryview[Any]:
        """Return the items of a field in one dimension; the layout has its shape. Raises KeyError."""
        field = self.layout[name]
        content = self._views[0][field.offset_bytes : field.offset_bytes + field.total_bytes]
        typed: memoryview[Any] = content.cast(_FORMATS[field.type])
        self._views += [content, typed]
        return typed

    def close(self) -> None:
        """Release all views and unmap. Raises BufferError, and leaves the segment mapped, while another object still
        uses a view."""
        try:
            while len(self._views) > 1:
                self._views[-1].release()
                self._views.pop()
            self._memory.close()
        except BufferError as error:
            raise BufferError(f"segment {self.layout.name}: still in use: {error}") from None


def create_memory_file(name: str) -> int:
    """Return the descriptor of a new memory file, which can be sealed. Raises OSError, or UserError where the system
    call is not known."""
    name = f"neuronpipe-{name}"
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, _MFD_CLOEXEC | _MFD_ALLOW_SEALING)
    return _memfd_create_by_number(name)


def _memfd_create_by_number(name: str) -> int:
    """Call what Python lacks if it was built for an Android older than 11."""
    import ctypes  # slow to import, and only such phones need it

    number = _MEMFD_CREATE.get(os.uname().machine)
    if number is None:
        raise UserError(f"segment {name}: no memfd_create known for {os.uname().machine}; use a newer Python")
    call = ctypes.CDLL(None, use_errno=True).syscall
    flags = ctypes.c_uint(_MFD_CLOEXEC | _MFD_ALLOW_SEALING)
    fd = int(call(ctypes.c_long(number), ctypes.c_char_p(name.encode()), flags))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd
