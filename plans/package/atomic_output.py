"""What appears at once and whole, or not at all: a package directory, or a file that a command writes.

A directory is written into `.NAME.partial-PID` beside the target and renamed at the end. What a killed process left
there is gone on with by the next one, if it is of the same work, and removed otherwise; a package being replaced waits
as `.NAME.old-PID` and comes back if nothing replaced it.
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
    """Context manager: a fresh directory that `publish` turns into the target, and that is gone otherwise.

    goes_on: whether what lies in a directory that a killed process left is to be gone on with; then it is in this one.
    """

    def __init__(
        self, target: Path, *, overwrite: bool, goes_on: Callable[[Path], bool] = lambda folder: False
    ) -> None:
        self.target = target.absolute()
        self.path = self._sibling("partial")
        self._old = self._sibling("old")
        self._overwrite = overwrite
        self._goes_on = goes_on

    def _sibling(self, kind: str) -> Path:
        return self.target.with_name(f".{self.target.name}.{kind}-{os.getpid()}")

    def __enter__(self) -> PartialDirectory:
        taken_over = self._take_over()
        _clear_leftovers(self.target)
        self._refuse_target()
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            if not taken_over:
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
        """Whether a killed process left something to go on with."""
        left = [path for path, kind in _leftovers(self.target) if kind == "partial"]
        for path in filter(self._goes_on, (self.path, *left)):
            with contextlib.suppress(OSError):  # another process may have been faster
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
        """Make the directory the target: on disk first, then by name."""
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


class KeptDirectory(PartialDirectory):
    """The same in a place of its own, on the same disk, that outlives an interruption: who comes there again goes on
    with what is there."""

    def __init__(self, target: Path, place: Path, *, overwrite: bool) -> None:
        super().__init__(target, overwrite=overwrite)
        self.path = place

    def __enter__(self) -> KeptDirectory:
        _clear_leftovers(self.target)
        self._refuse_target()
        for folder in (self.path, self.target.parent):
            make_folder(folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """It stays; published, it has gone."""


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, where they are not there. Raises UserError."""
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
    """What dead processes left beside the target, with its kind: partial or old."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(partial|old)-(\d+)")
    names = os.listdir(target.parent) if target.parent.is_dir() else []
    matches = filter(None, map(pattern.fullmatch, sorted(names)))
    return [(target.with_name(match[0]), match[1]) for match in matches if not _alive(int(match[2]))]


def _clear_leftovers(target: Path) -> None:
    """Undo what dead processes began: restore a package whose replacement never came, remove the rest."""
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
    """Where to write what is to become `path`: beside it, and what was there before stays until all is written. A
    device or a pipe has nothing beside it and is written to. Raises UserError for what the disk refuses."""
    try:
        beside = path.is_file() or not path.exists()
        target = path.resolve()  # a link stays a link
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    place = target.with_name(f".{target.name}.partial-{os.getpid()}") if beside else path
    try:
        yield place
        if beside:
            place.replace(target)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        if beside:
            with contextlib.suppress(OSError):
                place.unlink()
