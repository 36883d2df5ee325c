"""A directory that is in use for as long as its lock is held; afterwards anyone may remove it.

The lock (flock) shows whether its run lives. A process id would not: containers that share a folder do not see each
other's processes. A run's supervisor alone holds it, exclusively. Without the supervisor there is no run, the kernel
releases a lock however its holder ends, and a service that hangs keeps nothing alive. The command that forks the
supervisor takes the lock first, so that a directory that can be found is always locked. To test the lock, a process
takes it shared for a moment.
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
    """One such directory: `claim` makes it, `is_held` says whether it is in use, `remove` removes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None  # while this process, or a copy of it, is to be the run's supervisor

    def claim(self) -> None:
        """Make the directory, unless it is there, and lock it. Raises UserError when the place cannot serve.

        Others may remove a directory that is not locked yet: then the lock is on a file that has gone, and all is done
        again."""
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
        """Leave the lock to the copies of this process."""
        assert self._lock is not None
        os.close(self._lock)
        self._lock = None

    def is_held(self) -> bool:
        """Whether a run holds the lock. Raises OSError when there is no lock."""
        lock = self._lock_of_the_dead()
        if lock is not None:
            os.close(lock)
        return lock is None

    @contextlib.contextmanager
    def ending(self, timeout_s: float) -> Iterator[None]:
        """What this surrounds ends the run; it is left when nothing holds the lock any more. Raises NotRunning when it
        has ended already, UserError when that takes too long."""
        try:
            opened = (self.path / LOCK_FILE).open("rb")
        except FileNotFoundError:
            raise NotRunning(f"{self.path}: the run has ended") from None
        with opened as lock:  # the file goes first, the run with its lock
            yield
            deadline = time.monotonic() + timeout_s
            while not _locked(lock.fileno(), fcntl.LOCK_SH):
                if time.monotonic() > deadline:
                    raise UserError(f"{self.path}: the run does not end; its logs are there")
                time.sleep(LOOK_AGAIN_S)

    def remove(self) -> None:
        """Remove the directory and everything in it, the lock last; what has gone already is no error. What is no
        directory of ours (a link, another user's) is left alone."""
        if not self._is_ours():
            return
        self.clear()
        (self.path / LOCK_FILE).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self.path.rmdir()

    def remove_if_dead(self) -> None:
        """The same when no run holds the lock. A directory without a lock is left alone: a run may be making it."""
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
        """The directory could not be made: leave nothing of it."""
        with contextlib.suppress(OSError):
            self.path.rmdir() if self._lock is None else self.remove()
        if self._lock is not None:
            self.release()

    def clear(self) -> None:
        """Remove everything but the lock."""
        for folder, folders, files in os.walk(self.path, topdown=False):
            for name in files:
                if name != LOCK_FILE or Path(folder) != self.path:
                    Path(folder, name).unlink(missing_ok=True)
            for name in folders:
                inner = Path(folder, name)
                inner.unlink() if inner.is_symlink() else inner.rmdir()

    def write(self, name: str, text: str) -> None:
        """Write a file at once or not at all."""
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
        """When no run holds the lock, a descriptor with the shared lock: no run can take it until that is closed. None
        when a run holds it. Raises OSError when there is no lock."""
        lock = os.open(self.path / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        if _locked(lock, fcntl.LOCK_SH):
            return lock
        os.close(lock)
        return None

    def _has(self, lock: int) -> bool:
        """Whether this is the lock that lies here now."""
        try:
            there = (self.path / LOCK_FILE).lstat()
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(lock))

    def _is_ours(self) -> bool:
        """Whether the place itself, not what a link there points to, is a directory of this user."""
        try:
            status = self.path.lstat()
        except OSError:
            return False
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _locked(descriptor: int, kind: int) -> bool:
    """Take the lock; whether that was possible."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
