"""Packages of model files on this disk, called by name: each model is converted once, and its package is found again
while its files do not change.

    DATA/packages/NAME/source.json  the origin of the package: the path of the model, a fingerprint of its files, and
                                    the command if `convert` made it
    DATA/pulls/NAME/                the working folder of a conversion; a kill leaves it, and the next one continues

The fingerprint covers names, sizes and modification times, so that looking up a model reads none of its weights. The
path is part of the origin, because models of one family have the same sizes, and archives give all files the same time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from neuronpipe.plans.gguf_part_names import gguf_file, gguf_files, model_stem, place_among_parts
from neuronpipe.plans.package.atomic_output import whole_file
from neuronpipe.plans.package.manifest import BUNDLES, MANIFEST
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.pull.package_library import (
    Busy,
    Unfinished,
    begin,
    name_like,
    package_names,
    packages_folder,
    pull_names,
    refuse_used,
    unfinished_pull,
    working_folder,
)
from neuronpipe.plans.strict_json import one_line, read_json
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

if TYPE_CHECKING:
    from neuronpipe.plans.convert.block_conversion import Progress
    from neuronpipe.plans.convert.checkpoint import Options
    from neuronpipe.plans.convert.conversion import MeasureImportance, Report
    from neuronpipe.plans.package.layout import Quantization
    from neuronpipe.plans.quantization_choice import Choice, RequestedQuantization

RECORD = "source.json"
SUFFIXES = (".json", ".safetensors", ".jinja", ".model")
HUB_CACHE = "models--"  # huggingface_hub's cache stores models in models--ORG--NAME/snapshots/COMMIT
WAIT_S = 0.2


@frozen(slots=True)
class Origin:
    """A model on this disk in its present state: its path, absolute and without links, and the fingerprint of its
    files."""

    path: str
    fingerprint: str

    @classmethod
    def of(cls, source: Path) -> Origin:
        """Return the origin for a path. Any part of a GGUF model in parts denotes the model. Raises UserError for a
        path that cannot be read."""
        try:
            first = gguf_file(source)
            files = gguf_files(first)
            if first.is_dir():
                files = sorted(file for file in source.iterdir() if file.suffix in SUFFIXES)
            elif not source.is_dir():
                source = first
            versions = []
            for file in files:
                status = file.stat()
                if stat.S_ISREG(status.st_mode):
                    versions.append(f"{file.name} {status.st_size} {status.st_mtime_ns}")
        except OSError as error:
            missing = Path(error.filename or source)
            raise UserError(f"{missing}: cannot be read: {error.strerror}{place_among_parts(missing)}") from None
        path = os.fsencode(os.path.realpath(source)).decode(errors="backslashreplace")
        return cls(path, hashlib.sha256("\n".join(versions).encode(errors="backslashreplace")).hexdigest())


@frozen(kw_only=True)
class PackageRequest:
    """A package to make, as the user specified it.

    name: None, the default name
    command: the words of the command that makes the same from any folder; empty if the package is as `make` makes it
    """

    name: str | None = None
    quantization: RequestedQuantization | None = None
    gates: Quantization | None = None
    frequencies: Path | None = None
    options: Options | None = None
    importance: MeasureImportance | None = None
    overwrite: bool = False
    command: tuple[str, ...] = ()


@frozen(kw_only=True)
class Work:
    """The requirements of making a package.

    disk_bytes: still to be written
    replaces: there is a package of an earlier state of the files
    """

    name: str
    folder: Path
    choice: Choice
    disk_bytes: int
    free_bytes: int
    replaces: bool

    @property
    def missing_bytes(self) -> int:
        """Number of bytes that have to be freed first."""
        return max(self.disk_bytes - self.free_bytes, 0)


def is_source(path: Path) -> bool:
    """Return True if a path is a model that can be converted, or could be mistaken for one: any file, and a folder with
    a model's configuration or weights that is no package."""
    if not path.is_dir():
        return path.is_file()
    if any((path / name).exists() for name in (MANIFEST, BUNDLES)):  # also an incomplete package
        return False
    with os.scandir(path) as entries:
        return any(e.name == "config.json" or e.name.endswith((".safetensors", ".gguf")) for e in entries)


def origin_of(package: Path) -> Origin | None:
    """Return the origin of a package; None if it was not made from a model on this disk."""
    try:
        record = read_json(package / RECORD)
        return Origin(record.text("path"), record.text("fingerprint"))
    except UserError:
        return None


def existing_package(source: Path) -> Path | None:
    """Return the package that was made from a model, if there is one and the model has not changed since."""
    origin, unfinished = Origin.of(source), pull_names()
    packages = [packages_folder() / name for name in package_names() if name not in unfinished]
    return next((package for package in packages if origin_of(package) == origin), None)


def make(
    source: Path,
    *,
    options: Options,
    agree: Callable[[Work], None],
    waiting: Callable[[str], None],
    progress: Progress,
    report: Report,
) -> Package:
    """Make the package of a model on this disk, named like its file or folder, and open it. If another command makes it
    meanwhile, wait and open that one.

    Raises UserError for errors of model or disk. Then, and after Ctrl-C or SIGTERM, the working folder is removed;
    after a kill it stays, and the next command continues in it.

    agree: called once before anything large is written, with what it takes; raises UserError to refuse
    waiting: called with the package's name every WAIT_S seconds while another command makes it
    """
    while True:
        if (existing := existing_package(source)) is not None:
            return Package.open(existing)
        name = _name_for(source)
        _refuse_requested(source, name)
        try:
            with working_folder(name) as folder, _emptied(folder):
                if name == _name_for(source) and existing_package(source) is None:  # else another command was faster
                    return _make(source, name, folder, PackageRequest(options=options), agree, progress, report)
        except Busy:
            waiting(name)
            time.sleep(WAIT_S)


def make_as_requested(
    source: Path,
    request: PackageRequest,
    *,
    agree: Callable[[Work], None],
    waiting: Callable[[str], None],
    progress: Progress,
    report: Report,
) -> Package:
    """Make a package like `make`, but as requested. Raises UserError if there is a package of that name, unless it is
    to be replaced."""
    while True:
        name = request.name or _name_for(source)
        _refuse_taken(source, name, overwrite=request.overwrite)
        try:
            with working_folder(name) as folder:
                _refuse_taken(source, name, overwrite=request.overwrite)  # another command may have been faster
                with _emptied(folder):
                    return _make(source, name, folder, request, agree, progress, report)
        except Busy:
            waiting(name)
            time.sleep(WAIT_S)


@contextmanager
def _emptied(folder: Path) -> Iterator[None]:
    """Remove a working folder at the end, whatever happens."""
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_taken(source: Path, name: str, *, overwrite: bool) -> None:
    """Refuse a name that a package has, or is about to have. Raises UserError."""
    unfinished = unfinished_pull(name)
    if unfinished is not None and unfinished.reference != one_line(Origin.of(source).path):
        raise UserError(
            f"{name}: an interrupted command makes a package of {unfinished.reference} of that name; go on with that "
            f"one, remove it with `neuronpipe rm {name}`, or take another --name"
        )
    if (packages_folder() / name).exists() and not overwrite:
        raise UserError(f"{name}: is there already; take another --name, `neuronpipe rm {name}`, or pass --overwrite")


def _refuse_requested(source: Path, name: str) -> None:
    """Refuse to replace silently a package that the user requested, after its model has changed. Raises UserError."""
    try:
        command = [str(word) for word in read_json(packages_folder() / name / RECORD).items("command")]
    except UserError:
        return
    command_line = shlex.join(["neuronpipe", *command, "--overwrite"])
    raise UserError(f"{source}: has changed since `convert` made {name} of it; make that anew with `{command_line}`")


def _name_for(source: Path) -> str:
    """Return the name of the package that was, or is being, made from the same path; or else the first free name."""
    path, used = Origin.of(source).path, {*package_names(), *pull_names()}
    for name in sorted(used):
        if _source_path_of(name) == one_line(path):
            return name
    folder = Path(os.path.abspath(source))
    hub = next((part for part in folder.parts if part.startswith(HUB_CACHE)), None) if source.is_dir() else None
    stem = model_stem(folder.name) if source.is_file() else folder.name if hub is None else hub.split("--")[-1]
    first = name_like(stem)
    number, name = 1, first
    while name in used:
        number += 1
        name = f"{first[:90]}-{number}"
    return name


def _source_path_of(name: str) -> str | None:
    """Return the path from which the package of this name was, or is being, made, as one line."""
    if (unfinished := unfinished_pull(name)) is not None:
        return unfinished.reference
    origin = origin_of(packages_folder() / name)
    return None if origin is None else one_line(origin.path)


def _make(
    source: Path,
    name: str,
    folder: Path,
    request: PackageRequest,
    agree: Callable[[Work], None],
    progress: Progress,
    report: Report | None,
) -> Package:
    """Make a package while the lock of its name is held."""
    from neuronpipe.plans.convert.checkpoint import Options  # imports numpy, which other functions do not need
    from neuronpipe.plans.convert.conversion import Conversion, open_checkpoint
    from neuronpipe.plans.package.writer import disk_usage_bytes

    origin, target = Origin.of(source), packages_folder() / name
    with open_checkpoint(source, request.options or Options()) as checkpoint:
        conversion = Conversion(
            checkpoint,
            quantization=request.quantization,
            gates=request.gates,
            frequencies=request.frequencies,
            name=name,
        )
        if target.exists():
            refuse_used(name)
        agree(
            Work(
                name=name,
                folder=packages_folder(),
                choice=conversion.choice,
                disk_bytes=max(conversion.package_bytes - disk_usage_bytes(folder), 0),
                free_bytes=shutil.disk_usage(folder).free,
                replaces=target.exists(),
            )
        )
        command = request.command or ("inspect", os.path.abspath(source))
        if request.command and target.exists():
            command = (*command, "--overwrite")
        begin(folder, Unfinished(one_line(origin.path), origin.fingerprint, command))
        package = conversion.write(
            target, overwrite=True, importance=request.importance, progress=progress, report=report, place=folder
        )
    record = asdict(origin) | ({"command": request.command} if request.command else {})
    with whole_file(target / RECORD) as place:  # until it exists, the working folder marks the package as unfinished
        place.write_text(json.dumps(record), encoding="utf-8")
    return package
