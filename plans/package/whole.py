"""What appears at once and whole, or not at all: a package directory, or a file that a command writes.

A directory is written into `.NAME.partial-PID` beside the target and renamed at the end. What a killed process left
there is removed by the next one; a package being replaced waits as `.NAME.old-PID` and comes back if nothing
replaced it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from neuronpipe.plans.package.manifest import MANIFEST
from neuronpipe.protocol.errors import UserError


class PartialDirectory:
    """Context manager: a fresh directory that `publish` turns into the target, and that is gone otherwise."""

    def __init__(self, target: Path, *, overwrite: bool) -> None:
        self.target = target.absolute()
        self.path = self._sibling("partial")
        self._old = self._sibling("old")
        self._overwrite = overwrite

    def _sibling(self, kind: str) -> Path:
        return self.target.with_name(f".{self.target.name}.{kind}-{os.getpid()}")

    def __enter__(self) -> PartialDirectory:
        _clear_leftovers(self.target)
        self._refuse_target()
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir()
        except OSError as error:
            raise UserError(f"{self.target.parent}: cannot make a directory there: {error.strerror}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

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


def _clear_leftovers(target: Path) -> None:
    """Undo what dead processes began: restore a package whose replacement never came, remove the rest."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(partial|old)-(\d+)")
    names = os.listdir(target.parent) if target.parent.is_dir() else []
    for match in filter(None, map(pattern.fullmatch, names)):
        leftover = target.with_name(match[0])
        if _alive(int(match[2])):
            continue
        if match[1] == "old" and not os.path.lexists(target):
            with contextlib.suppress(OSError):
                leftover.rename(target)
        shutil.rmtree(leftover, ignore_errors=True)


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
