"""Adds an optional file to a package: the file first, then the manifest that names it. Every intermediate state is a
valid package."""

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
    """Add a file to a package, or replace it, and write a manifest that names it. Return the package with its new id.

    write: writes the file to a path and syncs it
    with_it: returns the new manifest, given the file's entry
    without: the manifest of the package without the file; None if the package has no such file yet

    All files are complete before the first is renamed, so a full disk leaves the package unchanged. A process that is
    killed leaves the package unchanged or without the file. Raises UserError for errors of the file system.
    """
    path = package.path
    file, lacking, complete = (path / f".{base}.partial-{os.getpid()}" for base in (name, "lacking", MANIFEST))
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
    """Raise UserError if the package cannot be written. Callers check this before they measure for hours."""
    if not os.access(package.path, os.W_OK):
        raise UserError(f"{package.path}: cannot be written, and what is measured is kept there; copy it first")


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _rename(path: Path, name: Path) -> None:
    """Rename a file, and wait until the rename is on disk."""
    path.rename(name)
    descriptor = os.open(name.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
