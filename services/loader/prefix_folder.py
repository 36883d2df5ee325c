"""The folder of the prompt cache: files of chunks within a budget, private to the user; the least recently used go.

The folder may serve several runs at once. A file appears under its name only when it is complete, and is never changed
after that; what is being written has a temporary name and a lock, so that what a killed process leaves can be told from
a live one's and removed. There is no index: names are keys, and modification times are the order of use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

SUFFIX, PART_SUFFIX = ".prefix", ".part"
MIN_FREE_BYTES = 256 << 20  # of the file system: the last bytes are for the user's own files
KEPT_SHARE = 0.95  # of the budget, after an eviction: the folder is not listed for every chunk
MAX_FILES = 1 << 16
_NAME = re.compile(rf"[0-9a-f]{{40}}(\.\w+)?({re.escape(SUFFIX)}|{re.escape(PART_SUFFIX)})")
log = logging.getLogger(__name__)


class Entry(NamedTuple):
    """A file of the folder."""

    used_ns: int
    name: str
    size_bytes: int


class PrefixFolder:
    """The files of one user.

    budget_bytes: maximum of bytes of all files
    total_bytes, files: those that this process knows of; other runs may have added some
    """

    def __init__(self, path: Path, budget_bytes: int) -> None:
        self.path, self.budget_bytes = path, budget_bytes
        self.total_bytes = self.files = 0
        self._uncounted_bytes = 0  # what this process has added since it counted
        self._failed = False  # the last write did; only the first of several failures is logged
        self._irremovable: set[str] = set()  # keys of names that cannot be removed

    def prepare(self) -> bool:
        """Make the folder, remove what killed processes have left, and keep the budget. Returns False, and logs why, if
        the folder cannot be used: it is a link, or another user's."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                log.warning("%s is not a folder of this user: there is no prompt cache", self.path)
                return False
            if status.st_mode & 0o077:
                self.path.chmod(0o700)
            self._remove_abandoned()
            self.count()
            self._evict(0)
        except OSError as error:
            log.warning("%s: %s: there is no prompt cache", self.path, error.strerror)
            return False
        return True

    def has(self, key: str) -> bool:
        """Return True if there is a file of this user with this key. Anything else of that name, such as a link, is
        removed with one line: else the chunk would be neither read nor saved again."""
        try:
            status = self._file(key).lstat()
        except OSError:
            return False
        if _is_own_file(status):
            return True
        self.discard(key, "it is no file of this user")
        return False

    @contextlib.contextmanager
    def opened(self, key: str) -> Iterator[int | None]:
        """Open the file with this key for reading while the context lasts; None if there is none, or only a link or a
        file of another user. A file that its owner may not read is removed with one line."""
        try:
            fd = os.open(self._file(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.EACCES:
                self.discard(key, "its mode forbids to read it")
            yield None
            return
        try:
            yield fd if _is_own_file(os.fstat(fd)) else None
        finally:
            os.close(fd)

    def used(self, keys: Sequence[str]) -> None:
        """Mark the files of a prefix as used now, the first as the last, so that a prefix loses its end first."""
        now_ns = time.time_ns()
        for depth, key in enumerate(keys):
            with contextlib.suppress(OSError):
                os.utime(self._file(key), ns=(now_ns, now_ns - 1000 * depth), follow_symlinks=False)

    def discard(self, key: str, reason: str) -> None:
        """Remove a file that cannot be used, and log the reason in one line, once if it cannot be removed."""
        if key in self._irremovable:
            return
        log.warning("the file %s%s of the prompt cache is ignored and removed: %s", key, SUFFIX, reason)
        try:
            self._file(key).unlink(missing_ok=True)
        except OSError:  # a folder
            self._irremovable.add(key)

    def add(self, key: str, size_bytes: int, write: Callable[[int], None]) -> bool:
        """Add a file, complete or not at all. Returns False if it cannot be written; a first failure is logged.

        write: writes the content to a descriptor; may raise OSError
        """
        if size_bytes > self.budget_bytes or key in self._irremovable:
            return False
        part = self.path / f"{key}.{os.getpid()}{PART_SUFFIX}"
        try:
            if not self._evict(size_bytes):
                raise OSError(0, "the disk has no room left for it")
            fd = _locked(part)
            try:
                write(fd)
                part.rename(self._file(key))
                _begin_to_write_back(fd)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)
        except OSError as error:
            if not self._failed:
                log.warning("the prompt cache cannot save to %s: %s", self.path, error.strerror)
            self._failed = True
            return False
        self._failed = False
        self.total_bytes += size_bytes
        self._uncounted_bytes += size_bytes
        self.files += 1
        return True

    def _file(self, key: str) -> Path:
        return self.path / f"{key}{SUFFIX}"

    def _evict(self, size_bytes: int) -> bool:
        """Remove the least recently used files until another one of this size fits. Returns False if it does not."""
        if self._uncounted_bytes + size_bytes > (1 - KEPT_SHARE) * self.budget_bytes:
            self.count()  # other runs may have added as much
        disk = os.statvfs(self.path)
        free_bytes = disk.f_bavail * disk.f_frsize - MIN_FREE_BYTES
        room_bytes = min(self.budget_bytes, self.total_bytes + free_bytes) - size_bytes
        if self.total_bytes <= room_bytes and self.files < MAX_FILES:
            return True
        for entry in self.count():
            if self.total_bytes <= KEPT_SHARE * room_bytes and self.files < KEPT_SHARE * MAX_FILES:
                break
            with contextlib.suppress(FileNotFoundError):  # another run was faster
                (self.path / entry.name).unlink()
            self.total_bytes -= entry.size_bytes
            self.files -= 1
        return room_bytes >= 0

    def count(self) -> list[Entry]:
        """Count the files and their bytes, since other runs may have added some. Returns them, least recently used
        first."""
        entries = sorted(self._entries())
        self.total_bytes, self.files = sum(entry.size_bytes for entry in entries), len(entries)
        self._uncounted_bytes = 0
        return entries

    def _entries(self) -> Iterator[Entry]:
        with os.scandir(self.path) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name) and entry.name.endswith(SUFFIX):
                    with contextlib.suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        if not stat.S_ISDIR(status.st_mode):  # which cannot be unlinked: it would end every eviction
                            yield Entry(status.st_mtime_ns, entry.name, status.st_size)

    def _remove_abandoned(self) -> None:
        """Remove the files that no live process is writing."""
        for path in self.path.glob(f"*{PART_SUFFIX}"):
            if not _NAME.fullmatch(path.name):
                continue
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # Its writer may have renamed it before it was locked here, or made another after it was removed.
                    if os.path.samestat(os.fstat(fd), path.lstat()):
                        path.unlink()
                finally:
                    os.close(fd)


def _locked(part: Path) -> int:
    """Create a file and lock it. Another run that starts may take it for abandoned before it is locked, and remove it:
    then it is created again. Raises OSError."""
    while True:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                return fd
        except BaseException:
            part.unlink(missing_ok=True)
            os.close(fd)
            raise
        os.close(fd)


def _is_own_file(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _begin_to_write_back(fd: int) -> None:
    """Let the system write the file to the disk and forget it: its pages must not displace other memory."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
