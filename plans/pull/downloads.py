"""Downloads the files of a repository: each continues where it was interrupted, is checked against the hub's checksum,
and is deleted when a conversion no longer needs it. While one file is converted, the next one is downloaded."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

import numpy as np
from neuronpipe.plans.convert.source_file import SourceFile
from neuronpipe.plans.package.atomic_output import make_folder
from neuronpipe.plans.pull.http_answers import AGAIN
from neuronpipe.plans.pull.hub import Hub
from neuronpipe.plans.pull.repository import RemoteFile, Snapshot
from neuronpipe.protocol.errors import UserError, safe_name
from numpy.typing import NDArray

HEADER_BLOCK_BYTES = 1 << 20  # of the first request for a header; each further request is twice as large, up to
MAX_HEADER_BLOCK_BYTES = 16 << 20  # so that a mirror without ranges sends little more than twice what is read
MAX_HEADER_BYTES = 128 << 20  # a header that claims to be larger is damaged or hostile
READ_BUFFER_BYTES = 64 << 10
READ_BYTES = 4 << 20
MAX_PATIENCE_S = 1.0  # for a download that is to stop and waits for the network

Count = Callable[[int], None]
"""Called with the number of bytes received since the last call; negative if they have to be downloaded again."""


class _Stopped(Exception):
    """Raised in a download that is no longer needed."""


class Downloads:
    """The files of one snapshot that are downloaded to a folder. Context manager: stops downloads, and keeps what has
    come."""

    def __init__(self, hub: Hub, snapshot: Snapshot, folder: Path, count: Count = lambda more: None) -> None:
        self._hub, self._snapshot, self._folder, self._count = hub, snapshot, folder, count
        self._order: list[DownloadedFile] = []
        self._fetches: dict[DownloadedFile, _Fetch] = {}
        self.stopped = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopped.set()
        for fetch in self._fetches.values():
            fetch.thread.join(MAX_PATIENCE_S)

    def open_file(self, path: Path) -> DownloadedFile:
        """Return a file of weights by its future path, for a conversion. Raises UserError if the repository does not
        have it."""
        return DownloadedFile(path, self._snapshot.file(path.relative_to(self._folder).as_posix()), self)

    def expect(self, order: Sequence[DownloadedFile]) -> None:
        """Set the order in which these files are needed: while one is converted, the next is downloaded."""
        self._order = list(order)

    def need(self, file: DownloadedFile) -> None:
        """Return when a file is complete, and start to download the next one. Raises UserError."""
        self._fetch(file).wait()
        if file in self._order:
            for following in self._order[self._order.index(file) + 1 :][:1]:
                self._fetch(following)

    def _fetch(self, file: DownloadedFile) -> _Fetch:
        if file not in self._fetches:
            self._fetches[file] = _Fetch(lambda: self.download_file(file.entry))
        return self._fetches[file]

    def download_file(self, entry: RemoteFile) -> Path:
        """Download one file completely and check it. Raises UserError."""
        self.require_checksum(entry)
        path = self.path(entry)
        if path.exists():
            return path
        part = self.part(entry)
        make_folder(part.parent)
        resumed = part.exists()
        try:
            if not self._complete(entry, part) and not (resumed and self._complete(entry, part)):
                raise UserError(
                    f"{self._snapshot.repository}: {safe_name(entry.name)}: came with another checksum than the hub "
                    f"gives: damaged on the way, or on a mirror; {AGAIN}"
                )
            part.rename(path)
        except OSError as error:
            raise UserError(f"{part}: cannot be written: {error.strerror}; {AGAIN}") from None
        return path

    def _complete(self, entry: RemoteFile, part: Path) -> bool:
        """Download the missing bytes of a file. Return True if its checksum is right; otherwise remove it."""
        with part.open("a+b") as file:
            if file.tell() > entry.bytes:
                file.truncate(0)
            target = _DownloadTarget(file, entry, self._count, self.stopped)
            self._hub.download(self._snapshot, entry, cast(BinaryIO, target))
            file.flush()
            os.fsync(file.fileno())
            if target.is_right():
                return True
            self._count(-file.tell())
        part.unlink()
        return False

    def require_checksum(self, entry: RemoteFile) -> None:
        """Refuse a file that could not be checked after its download."""
        if not (entry.sha256 or entry.blob):
            raise UserError(
                f"{self._snapshot.repository}: {safe_name(entry.name)}: {self._hub.endpoint} gives no checksum of it, "
                "so it cannot be checked; use another mirror"
            )

    def read(self, entry: RemoteFile, start: int, count: int) -> bytes:
        """Return a few bytes of a file at the hub."""
        return self._hub.read(self._snapshot, entry, start, count)

    def path(self, entry: RemoteFile) -> Path:
        """Return the path of a complete file."""
        return self._folder / entry.name

    def part(self, entry: RemoteFile) -> Path:
        """Return the path of an incomplete file."""
        path = self.path(entry)
        return path.with_name(f"{path.name}.part")

    def local_bytes(self, entry: RemoteFile) -> int:
        """Return how many bytes of a file are on this disk."""
        if self.path(entry).exists():
            return entry.bytes
        part = self.part(entry)
        return min(part.stat().st_size, entry.bytes) if part.exists() else 0


class DownloadedFile(SourceFile):
    """A file of weights that is at the hub until it is fetched, and then on this disk until it is released."""

    def __init__(self, path: Path, entry: RemoteFile, downloads: Downloads) -> None:
        super().__init__(path)
        self.entry, self._downloads = entry, downloads
        self._is_local = path.exists()

    @property
    def version(self) -> str:
        return f"{self.entry.name} {self.entry.sha256 or self.entry.blob}"

    def beginning(self) -> BinaryIO:
        if self._is_local:
            return super().beginning()
        return io.BufferedReader(_RemoteHeader(self.entry, self._downloads), READ_BUFFER_BYTES)

    def fetch(self) -> None:
        if not self._is_local:
            self._downloads.need(self)
            self._is_local = True

    def release(self) -> None:
        self.close()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
        self._is_local = False

    def read_into(self, offset: int, target: NDArray[np.uint8]) -> None:
        if self._is_local:
            super().read_into(offset, target)
            return
        data = self._downloads.read(self.entry, offset, target.nbytes)
        if len(data) < target.nbytes:
            raise UserError(f"{self.path}: ends at byte {offset + len(data)}, where a tensor should lie: truncated")
        target.data.cast("B")[:] = data


class _RemoteHeader(io.RawIOBase):
    """A file at the hub, for reading its header: blocks of growing size are read on demand."""

    def __init__(self, entry: RemoteFile, downloads: Downloads) -> None:
        self._entry, self._downloads, self._at = entry, downloads, 0
        self._block, self._block_start, self._next_bytes = b"", 0, HEADER_BLOCK_BYTES

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._entry.bytes}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any) -> int:
        if not self._block_start <= self._at < self._block_start + len(self._block):
            if self._at >= MAX_HEADER_BYTES:
                raise UserError(
                    f"{safe_name(self._entry.name)}: its header is longer than {MAX_HEADER_BYTES} bytes: damaged"
                )
            self._block, self._block_start = self._downloads.read(self._entry, self._at, self._next_bytes), self._at
            self._next_bytes = min(2 * self._next_bytes, MAX_HEADER_BLOCK_BYTES)
        from_block = self._at - self._block_start
        data = self._block[from_block : from_block + len(target)]
        target[: len(data)] = data
        self._at += len(data)
        return len(data)


class _DownloadTarget:
    """The target of a download, with the methods that a download needs: bytes are counted and hashed as they come."""

    def __init__(self, file: BinaryIO, entry: RemoteFile, count: Count, stopped: threading.Event) -> None:
        self._file, self._entry, self._count, self._stopped = file, entry, count, stopped
        # Git's own checksum covers a small header before the content.
        blob = hashlib.sha1(b"blob %d\0" % entry.bytes, usedforsecurity=False)
        self._hash: Any = blob if entry.sha256 is None else hashlib.sha256()
        file.seek(0)
        while data := file.read(READ_BYTES):
            self._hash.update(data)

    def is_right(self) -> bool:
        """Return True if the content has the hub's checksum."""
        return bool(self._hash.hexdigest() == (self._entry.sha256 or self._entry.blob))

    def write(self, data: bytes) -> int:
        if self._stopped.is_set():
            raise _Stopped
        self._hash.update(data)
        self._count(len(data))
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()


class _Fetch:
    """One download in a thread of its own, which blocks only callers that need it."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._error: Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._error = error

    def wait(self) -> None:
        """Wait until it is done, and raise what it raised."""
        self.thread.join()
        if self._error is not None:
            raise self._error
