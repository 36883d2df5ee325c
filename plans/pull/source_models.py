"""Packages of models whose files are on this disk. Each model is converted once; while its files do not change, later
commands use the package.

    DATA/packages/NAME/source.json  the origin of the package: the path of the model, a fingerprint of its files, and
                                    the command if `convert` made it
    DATA/pulls/NAME/                the working folder of a conversion; it stays after a kill, and the next conversion
                                    continues

The fingerprint covers names, sizes and modification times, so that no weights are read to look up a model. The path is
part of the origin, because models of one family have the same sizes, and archives give all files the same time.
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
from neuronpipe.plans.package.atomic_output import disk_usage_bytes, whole_file
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
    """A model on this disk in its current state.

    path: absolute and without links
    fingerprint: a hash of names, sizes and modification times of its files
    """

    path: str
    fingerprint: str

    @classmethod
    def of(cls, source: Path) -> Origin:
        """Return the origin of the model at a path, which may be any part of a GGUF model. Raises UserError if a file
        cannot be read."""
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
    """The user's wishes for a package.

    name: None: the default name
    quantization, gates, by_neuron, frequencies, importance, overwrite: as in `convert`
    command: the words of the `convert` command that makes the package again, with absolute paths; empty for `make`
    may_be_in_place: whether experts may stay in the model's own files
    """

    name: str | None = None
    quantization: RequestedQuantization | None = None
    gates: Quantization | None = None
    by_neuron: bool = False
    frequencies: Path | None = None
    options: Options | None = None
    importance: MeasureImportance | None = None
    overwrite: bool = False
    command: tuple[str, ...] = ()
    may_be_in_place: bool = False


@frozen(kw_only=True)
class Work:
    """The requirements of a conversion.

    disk_bytes: bytes to write, without those of interrupted work that is continued
    replaces: True if a package of that name exists, which will be replaced
    experts_in_place: True if the package will read its experts from the model's own files
    why_copied: a clause on why it will not, if it is a mixture that is not converted by request; else ""
    """

    name: str
    folder: Path
    choice: Choice
    disk_bytes: int
    free_bytes: int
    replaces: bool
    experts_in_place: bool = False
    why_copied: str = ""

    @property
    def missing_bytes(self) -> int:
        return max(self.disk_bytes - self.free_bytes, 0)


def is_source(path: Path) -> bool:
    """Return True if a path is a file, or a folder that has a model's configuration or weights and is no package, not
    even an incomplete one."""
    if not path.is_dir():
        return path.is_file()
    if any((path / name).exists() for name in (MANIFEST, BUNDLES)):
        return False
    with os.scandir(path) as entries:
        return any(e.name == "config.json" or e.name.endswith((".safetensors", ".gguf")) for e in entries)


def origin_of(package: Path) -> Origin | None:
    """Return the origin of the package in a folder; None if it is not of a model on this disk."""
    try:
        record = read_json(package / RECORD)
        return Origin(record.text("path"), record.text("fingerprint"))
    except UserError:
        return None


def existing_package(source: Path) -> Path | None:
    """Return the folder of the package of a model in its current state; None if there is none. Raises UserError as
    `Origin.of`."""
    origin, unfinished = Origin.of(source), pull_names()
    packages = [packages_folder() / name for name in package_names() if name not in unfinished]
    return min((package for package in packages if origin_of(package) == origin), key=_has_no_experts, default=None)


def _has_no_experts(package: Path) -> bool:
    """Return True if the package in a folder reads its experts from the model's own files."""
    return not (package / BUNDLES).exists()


def make(
    source: Path,
    *,
    options: Options,
    agree: Callable[[Work], None],
    waiting: Callable[[str], None],
    progress: Progress,
    report: Report,
) -> Package:
    """Return the package of a model on this disk. Convert the model first if there is no package of its current state,
    but leave the experts of a mixture where they are if they can be read in place.

    The package is named like the model's file or folder. While another command works on that name, `make` waits, and
    then uses its package or converts. Raises UserError for errors of model or disk, or if `convert` made the package of
    an earlier state. The working folder is removed after every exception, including Ctrl-C. After a kill it stays, and
    the next command continues.

    agree: is called with the requirements before a conversion writes anything; raises UserError to cancel it
    waiting: is called with the package's name every WAIT_S seconds while another command works on it
    """
    while True:
        if (existing := existing_package(source)) is not None:
            return Package.open(existing)
        name = _name_for(source)
        _refuse_requested(source, name)
        try:
            with working_folder(name) as folder, _removed_at_exit(folder):
                # Another command may have made the package before this one got the lock.
                if name == _name_for(source) and existing_package(source) is None:
                    return _make(
                        source,
                        name,
                        folder,
                        PackageRequest(options=options, may_be_in_place=True),
                        agree,
                        progress,
                        report,
                    )
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
    """Convert a model on this disk as requested, and return the package. Parameters and exceptions are those of `make`.
    Also raises UserError if the name is in use."""
    while True:
        name = request.name or _name_for(source)
        _refuse_name_in_use(source, name, overwrite=request.overwrite)
        try:
            with working_folder(name) as folder:
                # Another command may have made a package before this one got the lock.
                _refuse_name_in_use(source, name, overwrite=request.overwrite)
                with _removed_at_exit(folder):
                    return _make(source, name, folder, request, agree, progress, report)
        except Busy:
            waiting(name)
            time.sleep(WAIT_S)


@contextmanager
def _removed_at_exit(folder: Path) -> Iterator[None]:
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_name_in_use(source: Path, name: str, *, overwrite: bool) -> None:
    """Raise UserError if a package has the name, unless `overwrite`, or an interrupted command for another model. A
    package that reads its experts from the same model may be replaced."""
    unfinished = unfinished_pull(name)
    if unfinished is not None and unfinished.reference != one_line(Origin.of(source).path):
        raise UserError(
            f"{name}: an interrupted command makes a package of {unfinished.reference} of that name; go on with that "
            f"one, remove it with `neuronpipe rm {name}`, or take another --name"
        )
    existing = packages_folder() / name
    if not existing.exists() or overwrite:
        return
    origin = origin_of(existing)
    if not _has_no_experts(existing) or origin is None or origin.path != Origin.of(source).path:
        raise UserError(f"{name}: is there already; take another --name, `neuronpipe rm {name}`, or pass --overwrite")


def _refuse_requested(source: Path, name: str) -> None:
    """Raise UserError if `convert` made the package of this name. `make` would replace it without the user's
    options."""
    try:
        command = [str(word) for word in read_json(packages_folder() / name / RECORD).items("command")]
    except UserError:
        return
    command_line = shlex.join(["neuronpipe", *command, "--overwrite"])
    raise UserError(f"{source}: has changed since `convert` made {name} of it; make that anew with `{command_line}`")


def _name_for(source: Path) -> str:
    """Return the name of the finished or unfinished package of the same path, or else the first free name."""
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
    """Return the path of a package's model as one line; None if it is not on this disk."""
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
    """Convert a model, while the caller holds the lock of the name. Parameters as in `make_as_requested`."""
    from neuronpipe.plans.convert.checkpoint import Options  # imports numpy, which other functions do not need
    from neuronpipe.plans.convert.conversion import Conversion, open_checkpoint
    from neuronpipe.plans.convert.experts_in_place import experts_in_place

    origin, target = Origin.of(source), packages_folder() / name
    with open_checkpoint(source, request.options or Options()) as checkpoint:
        placed = experts_in_place(checkpoint) if request.may_be_in_place else ""
        experts = None if isinstance(placed, str) else placed
        if experts is not None and Origin.of(source) != origin:
            raise UserError(f"{source}: changed while its header was read; try again when it is complete")
        conversion = Conversion(
            checkpoint,
            experts=experts,
            quantization=request.quantization,
            gates=request.gates,
            by_neuron=request.by_neuron,
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
                experts_in_place=experts is not None,
                why_copied=placed if isinstance(placed, str) else "",
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
