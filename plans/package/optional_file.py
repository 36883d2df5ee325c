"""Giving a package a file that it may have or lack: the file first, the manifest that names it last. Every state
between is a package."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from neuronpipe.plans.package.manifest import MANIFEST, FileEntry, Manifest
from neuronpipe.plans.package.reader import Package, sha256_of
from neuronpipe.protocol.errors import UserError


def give_file(
    package: Package,
    name: str,
    write: Callable[[Path], None],
    *,
    with_it: Callable[[FileEntry], Manifest],
    without: Manifest | None,
) -> Package:
    """Write a file and the manifest of the package with it, replacing an older one of that name. write: makes the file,
    and syncs it. with_it: the manifest, by the file's entry. without: the manifest of the package that lacks the file;
    None where it lacks it now.

    The manifest's id changes. All files are complete before the first of them gets its name: a disk that is full leaves
    the package as it was. A process that is killed meanwhile leaves it as it was, or without the file.
    Raises UserError for what the disk refuses.
    """
    path = package.path
    file, lacking, complete = (path / f".{one}.partial-{os.getpid()}" for one in (name, "lacking", MANIFEST))
    try:
        write(file)
        _write(complete, with_it(FileEntry(file.stat().st_size, sha256_of(file))).sealed().to_bytes())
        if without is not None:
            _write(lacking, without.sealed().to_bytes())
            _rename(lacking, path / MANIFEST)
        _rename(file, path / name)
        _rename(complete, path / MANIFEST)
    except OSError as error:
        raise UserError(f"{path / name}: cannot be written: {error.strerror}") from None
    finally:
        for partial in (file, lacking, complete):
            with contextlib.suppress(OSError):
                partial.unlink()
    return Package.open(path)


def require_writable(package: Package) -> None:
    """Raises UserError where nothing can be given to the package: before hours of measuring, not after."""
    if not os.access(package.path, os.W_OK):
        raise UserError(f"{package.path}: cannot be written, and what is measured is kept there; copy it first")


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _rename(path: Path, name: Path) -> None:
    """Rename, and have it on disk before the next one."""
    path.rename(name)
    descriptor = os.open(name.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
