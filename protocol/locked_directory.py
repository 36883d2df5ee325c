"""A directory that is in use while its lock is held. Afterwards any process of its user may remove it.

The lock (flock) shows whether its run lives. A process id would not: containers that share a folder do not see each
other's processes. Only the run's supervisor holds the lock, exclusively: without the supervisor there is no run, the
kernel releases the lock however the supervisor ends, and a service that hangs keeps nothing alive. The command that
forks the supervisor takes the lock first, so that a directory that can be found is always locked. A process tests the
lock by taking it shared for a moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from neuronpipe.protocol.errors import NotRunning, UserError

LOCK_FILE = "neuronpipe.lock"
MAX_CLAIM_S = 0.5  # a process that tests the lock releases it at once
LOOK_AGAIN_S = 0.01


class LockedDirectory:
    """A locked directory: `claim` makes it, `is_held` returns whether it is in use, `remove` removes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None  # set while this process or a fork of it is to be the run's supervisor

    def claim(self) -> None:
        """Make the directory, unless it exists, and lock it. Raises UserError if a run is live there, or if it is
        another user's, or has files but no lock.

        If another process removes the directory before it is locked, everything is repeated.
        """
        deadline = time.monotonic() + MAX_CLAIM_S
        while self._lock is None:
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            self._require_usable()
            with contextlib.suppress(FileNotFoundError):
                lock = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                if _locked(lock, fcntl.LOCK_EX) and self._has(lock):
                    self._lock = lock
                    return
                os.close(lock)
            if time.monotonic() > deadline:
                raise UserError(f"{self.path}: a run is live here; stop it or name another place")
            time.sleep(LOOK_AGAIN_S)

    def release(self) -> None:
        """Close this process's descriptor of the lock; forks of this process keep theirs."""
        assert self._lock is not None
        os.close(self._lock)
        self._lock = None

    def is_held(self) -> bool:
        """Return True if a run holds the lock. Raises OSError if there is no lock."""
        lock = self._lock_of_the_dead()
        if lock is not None:
            os.close(lock)
        return lock is None

    @contextlib.contextmanager
    def ending(self, timeout_s: float) -> Iterator[None]:
        """Surround code that ends the run, and then wait until no process holds the lock. Raises NotRunning if the
        directory has no lock file, UserError if the lock is held for longer than `timeout_s`."""
        try:
            opened = (self.path / LOCK_FILE).open("rb")
        except FileNotFoundError:
            raise NotRunning(f"{self.path}: the run has ended") from None
        with opened as lock:  # the file is removed first; the run ends when it releases the lock
            yield
            deadline = time.monotonic() + timeout_s
            while not _locked(lock.fileno(), fcntl.LOCK_SH):
                if time.monotonic() > deadline:
                    raise UserError(f"{self.path}: the run does not end; its logs are there")
                time.sleep(LOOK_AGAIN_S)

    def remove(self) -> None:
        """Remove the directory and everything in it, the lock last. A missing directory is no error. A link, or a
        directory of another user, is left alone."""
        if not self._is_ours():
            return
        self.clear()
        (self.path / LOCK_FILE).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self.path.rmdir()

    def remove_if_dead(self) -> None:
        """Remove the directory if no run holds the lock. A directory without a lock is left alone, since a run may be
        making it."""
        if not self._is_ours():
            return
        with contextlib.suppress(OSError):  # gone meanwhile, or without a lock
            lock = self._lock_of_the_dead()
            if lock is not None:
                try:
                    if self._has(lock):
                        self.remove()
                finally:
                    os.close(lock)

    def unmake(self) -> None:
        """Undo `claim` or a part of it: remove the directory and release the lock. Without the lock, only an empty
        directory is removed."""
        with contextlib.suppress(OSError):
            self.path.rmdir() if self._lock is None else self.remove()
        if self._lock is not None:
            self.release()

    def clear(self) -> None:
        """Remove everything except the lock."""
        for folder, folders, files in os.walk(self.path, topdown=False):
            for name in files:
                if name != LOCK_FILE or Path(folder) != self.path:
                    Path(folder, name).unlink(missing_ok=True)
            for name in folders:
                inner = Path(folder, name)
                inner.unlink() if inner.is_symlink() else inner.rmdir()

    def write(self, name: str, text: str) -> None:
        """Write a file of the directory, replacing an older one atomically."""
        fresh = self.path / f".{name}"
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as stream:
            stream.write(text)
        fresh.rename(self.path / name)

    def _require_usable(self) -> None:
        if not self._is_ours():
            raise UserError(f"{self.path}: not a directory of yours; name another place")
        names = os.listdir(self.path)
        if names and LOCK_FILE not in names:
            raise UserError(f"{self.path}: not empty and no run directory; name another place")

    def _lock_of_the_dead(self) -> int | None:
        """Return a descriptor that holds the shared lock, or None if a run holds the lock. No run can take the lock
        until the descriptor is closed. Raises OSError if there is no lock."""
        lock = os.open(self.path / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        if _locked(lock, fcntl.LOCK_SH):
            return lock
        os.close(lock)
        return None

    def _has(self, lock: int) -> bool:
        """Return True if this is the lock file that the directory contains now."""
        try:
            status = (self.path / LOCK_FILE).lstat()
        except FileNotFoundError:
            return False
        return os.path.samestat(status, os.fstat(lock))

    def _is_ours(self) -> bool:
        """Return True if the path itself, not the target of a link, is a directory of this user."""
        try:
            status = self.path.lstat()
        except OSError:
            return False
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _locked(descriptor: int, kind: int) -> bool:
    """Try to take the lock. Return True on success."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
