"""Downloads the files of a repository. A download continues where it was interrupted, and is compared with the hub's
checksum. A file is deleted when the conversion no longer needs it."""

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

HEADER_BLOCK_BYTES = 1 << 20  # of the first request for a header; later requests are twice as large, up to the maximum
MAX_HEADER_BLOCK_BYTES = 16 << 20
MAX_HEADER_BYTES = 128 << 20  # larger headers are damaged or hostile
READ_BUFFER_BYTES = 64 << 10
READ_BYTES = 4 << 20
MAX_PATIENCE_S = 1.0  # for a stopped download to end, which may wait for the network

Count = Callable[[int], None]
"""Is called with the number of bytes received since the last call; negative if they have to be downloaded again."""


class _Stopped(Exception):
    """Ends the thread of a download that is no longer needed."""


class Downloads:
    """The downloads of a snapshot's files. A context manager that stops downloads at exit; received bytes stay in the
    folder. Methods raise UserError.

    count: is called for received bytes, by any thread
    """

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
        """Return a file of weights for a conversion. path: where it will be after its download."""
        return DownloadedFile(path, self._snapshot.file(path.relative_to(self._folder).as_posix()), self)

    def expect(self, order: Sequence[DownloadedFile]) -> None:
        """Set the order in which files are needed, so that `need` can start the download of the next one."""
        self._order = list(order)

    def need(self, file: DownloadedFile) -> None:
        """Wait until a file is downloaded, then start to download the next one in a thread."""
        self._fetch(file).wait()
        if file in self._order:
            for following in self._order[self._order.index(file) + 1 :][:1]:
                self._fetch(following)

    def _fetch(self, file: DownloadedFile) -> _Fetch:
        if file not in self._fetches:
            self._fetches[file] = _Fetch(lambda: self.download_file(file.entry))
        return self._fetches[file]

    def download_file(self, entry: RemoteFile) -> Path:
        """Return the path of a file. If it is not there, download it and compare its checksum. If that is wrong after a
        resumed download, the whole file is downloaded again."""
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
        """Download the missing bytes of a file. If its checksum is wrong, remove it and return False."""
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
        """Raise UserError if the hub states no checksum of a file."""
        if not (entry.sha256 or entry.blob):
            raise UserError(
                f"{self._snapshot.repository}: {safe_name(entry.name)}: {self._hub.endpoint} gives no checksum of it, "
                "so it cannot be checked; use another mirror"
            )

    def read(self, entry: RemoteFile, start: int, count: int) -> bytes:
        return self._hub.read(self._snapshot, entry, start, count)

    def path(self, entry: RemoteFile) -> Path:
        return self._folder / entry.name

    def part(self, entry: RemoteFile) -> Path:
        """Return the path of a file while it is incomplete."""
        path = self.path(entry)
        return path.with_name(f"{path.name}.part")

    def local_bytes(self, entry: RemoteFile) -> int:
        if self.path(entry).exists():
            return entry.bytes
        part = self.part(entry)
        return min(part.stat().st_size, entry.bytes) if part.exists() else 0


class DownloadedFile(SourceFile):
    """A file of weights that is read from the hub until it is fetched, and then from this disk until it is released."""

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
    """A stream of a file at the hub, for reading its header. Growing requests limit the bytes of mirrors without
    ranges, which send the file from its beginning each time."""

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


def _git_hash(entry: RemoteFile) -> Any:
    """Return git's hash of a file, SHA-1 or SHA-256, after the header that precedes the content."""
    name = "sha256" if len(entry.blob or "") == hashlib.sha256().digest_size * 2 else "sha1"
    return hashlib.new(name, b"blob %d\0" % entry.bytes, usedforsecurity=False)


class _DownloadTarget:
    """The target of `Hub.download`, which counts and hashes the bytes."""

    def __init__(self, file: BinaryIO, entry: RemoteFile, count: Count, stopped: threading.Event) -> None:
        self._file, self._entry, self._count, self._stopped = file, entry, count, stopped
        self._hash: Any = hashlib.sha256() if entry.sha256 else _git_hash(entry)
        file.seek(0)
        while data := file.read(READ_BYTES):
            self._hash.update(data)

    def is_right(self) -> bool:
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
        """Wait until the download is complete. Raises its error if it failed."""
        self.thread.join()
        if self._error is not None:
            raise self._error
