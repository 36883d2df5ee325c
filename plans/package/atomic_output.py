"""Output that appears complete or not at all: a package directory, or a file that a command writes.

A directory is written as `.NAME.partial-PID` beside the target and renamed at the end. If a process was killed, the
next process for this target continues the directory if it does the same work, and otherwise removes it. A package that
is being replaced is renamed to `.NAME.old-PID` meanwhile, and restored if the replacement failed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from neuronpipe.plans.package.manifest import MANIFEST
from neuronpipe.protocol.errors import UserError


class PartialDirectory:
    """A context manager of a new directory, `path`. `publish` renames it to `target`; otherwise it is removed at exit.

    overwrite: an existing package at `target` may be replaced
    can_resume: returns True if the directory of a killed process can be used instead of an empty one

    Raises UserError if the target may not be replaced, or the directory cannot be made.
    """

    def __init__(
        self, target: Path, *, overwrite: bool, can_resume: Callable[[Path], bool] = lambda folder: False
    ) -> None:
        self.target = target.absolute()
        self.path = self._sibling("partial")
        self._old = self._sibling("old")
        self._overwrite = overwrite
        self._can_resume = can_resume

    def _sibling(self, kind: str) -> Path:
        return self.target.with_name(f".{self.target.name}.{kind}-{os.getpid()}")

    def __enter__(self) -> PartialDirectory:
        is_resumed = self._take_over()
        _clear_leftovers(self.target)
        self._refuse_target()
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            if not is_resumed:
                shutil.rmtree(self.path, ignore_errors=True)
                self.path.mkdir()
        except OSError as error:
            raise UserError(f"{self.target.parent}: cannot make a directory there: {error.strerror}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _take_over(self) -> bool:
        """Rename to `path` a directory of a killed process whose work can be continued; False if there is none."""
        partial_folders = [path for path, kind in _leftovers(self.target) if kind == "partial"]
        for path in filter(self._can_resume, (self.path, *partial_folders)):
            with contextlib.suppress(OSError):  # another process may have taken it over
                path.rename(self.path)
                return True
        return False

    def _refuse_target(self) -> None:
        if not self.target.name:
            raise UserError(f"{self.target}: name a directory for the package")
        if not os.path.lexists(self.target):
            return
        if not self._overwrite:
            raise UserError(f"{self.target}: exists already; choose another name or pass --overwrite")
        if not (self.target / MANIFEST).is_file():
            raise UserError(f"{self.target}: is no package, so it is not overwritten; choose another name")

    def publish(self) -> None:
        """Rename the directory to the target, after its content is on disk. Raises UserError if the target may not be
        replaced, OSError if the file system refuses."""
        for file in self.path.iterdir():
            _sync(file)
        _sync(self.path)
        self._refuse_target()
        if replacing := os.path.lexists(self.target):
            self.target.rename(self._old)
        try:
            self.path.rename(self.target)
        except OSError:
            if replacing:
                self._old.rename(self.target)
            raise
        _sync(self.target.parent)
        shutil.rmtree(self._old, ignore_errors=True)


class ResumableDirectory(PartialDirectory):
    """A partial directory at the path `place`, on the disk of the target. It is never removed, so that the next process
    continues with its content."""

    def __init__(self, target: Path, place: Path, *, overwrite: bool) -> None:
        super().__init__(target, overwrite=overwrite)
        self.path = place

    def __enter__(self) -> ResumableDirectory:
        _clear_leftovers(self.target)
        self._refuse_target()
        for folder in (self.path, self.target.parent):
            make_folder(folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Keep the directory, unlike the base class."""


def make_folder(path: Path) -> None:
    """Make a folder and its parents, unless they exist. Raises UserError if the file system refuses."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot make a directory there: {error.strerror}") from None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _leftovers(target: Path) -> list[tuple[Path, str]]:
    """Return (path, kind) of the directories that dead processes left beside the target. kind: "partial" or "old"."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(partial|old)-(\d+)")
    names = os.listdir(target.parent) if target.parent.is_dir() else []
    matches = filter(None, map(pattern.fullmatch, sorted(names)))
    return [(target.with_name(match[0]), match[1]) for match in matches if not _alive(int(match[2]))]


def _clear_leftovers(target: Path) -> None:
    """Restore a package that a dead process was replacing, and remove all other directories of dead processes."""
    for path, kind in _leftovers(target):
        if kind == "old" and not os.path.lexists(target):
            with contextlib.suppress(OSError):
                path.rename(target)
        shutil.rmtree(path, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` to write to, and rename it to `path` at the end, so that an old file stays until the
    new one is complete. For a device or a pipe, yield `path`. Raises UserError for errors of the file system."""
    try:
        is_replaced = path.is_file() or not path.exists()
        target = path.resolve()  # a link stays a link
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    place = target.with_name(f".{target.name}.partial-{os.getpid()}") if is_replaced else path
    try:
        yield place
        if is_replaced:
            place.replace(target)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        if is_replaced:
            with contextlib.suppress(OSError):
                place.unlink()


def disk_usage_bytes(folder: Path) -> int:
    """Return the allocated bytes of all files below a folder; files with holes take less than their length."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
