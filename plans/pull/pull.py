"""A pull: first what it takes, known from headers before anything large comes; then download and conversion at once.

A shard is converted while the next one comes, and goes when nothing in it is needed any more. So the disk holds the
package and a few shards, never the package and the whole source; how many depends on which layers share a shard. A GGUF
model in parts has its parts as shards. A GGUF file that is one is one shard: every layer needs it.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

from neuronpipe.plans.convert.block_conversion import Progress
from neuronpipe.plans.convert.checkpoint import Checkpoint, Options
from neuronpipe.plans.convert.checkpoint_pieces import Piece
from neuronpipe.plans.convert.conversion import Conversion, Report
from neuronpipe.plans.convert.gguf_model import open_gguf
from neuronpipe.plans.convert.huggingface import open_huggingface
from neuronpipe.plans.convert.source_file import SourceFile
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.writer import bytes_there
from neuronpipe.plans.pull.downloads import Arrivals, ArrivingFile
from neuronpipe.plans.pull.http_answers import Tell
from neuronpipe.plans.pull.hub import Hub
from neuronpipe.plans.pull.package_library import (
    STATE,
    Unfinished,
    begin,
    packages_folder,
    unfinished_pull,
    working_folder,
)
from neuronpipe.plans.pull.repository import Reference, Snapshot
from neuronpipe.plans.quantization_choice import Choice
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

SOURCE = "source"  # in the folder of a pull: what comes from the hub


@frozen(kw_only=True)
class Need:
    """What a pull takes. download_bytes: still to come, in so many files. disk_bytes: used at one moment at most, of
    which there_bytes are used already. free_bytes: on that disk, now. goes_on: after an interruption."""

    snapshot: Snapshot
    folder: Path
    files: int
    download_bytes: int
    choice: Choice
    disk_bytes: int
    there_bytes: int
    free_bytes: int
    goes_on: bool

    @property
    def missing_bytes(self) -> int:
        """How much more has to be free."""
        return max(self.disk_bytes - self.there_bytes - self.free_bytes, 0)


def pull(
    reference: Reference,
    name: str,
    *,
    quantization: Quantization | None,
    gates: Quantization | None,
    options: Options,
    overwrite: bool,
    command: Sequence[str],
    agree: Callable[[Need], None],
    progress: Progress,
    report: Report | None = None,
    tell: Tell = lambda line: None,
) -> tuple[Package, Need]:
    """Make the package `name` of a repository's model; also what that took.

    command: the words that go on with it. agree: called with what it takes before anything large comes; raises
    UserError to refuse, and no trace is left. From then on what has come stays when the pull is interrupted or fails,
    and the next pull of the same goes on with it. tell: hears why the hub lets a person wait. Raises
    UserError for whatever is wrong with model, hub, network or disk.
    """
    target = packages_folder() / name
    if target.exists() and not overwrite:
        raise UserError(f"{name}: is there already; take another --name, `neuronpipe rm {name}`, or pass --overwrite")
    with working_folder(name) as folder:
        try:
            hub = Hub(tell)
            snapshot = _snapshot(hub, reference, name)
            tally = _Tally(progress)
            with (
                Arrivals(hub, snapshot, folder / SOURCE, tally.arrived) as arrivals,
                _opened(arrivals, snapshot, reference, folder / SOURCE, options) as checkpoint,
            ):
                conversion = Conversion(checkpoint, quantization=quantization, gates=gates, name=name)
                need = _prepare(arrivals, snapshot, conversion, folder, tally)
                agree(need)
                begin(folder, Unfinished(str(reference), snapshot.commit, tuple(command)))
                package = conversion.write(
                    target, overwrite=overwrite, progress=tally.converted, report=report, place=folder
                )
            (folder / STATE).unlink()
        except UserError as error:  # a person knows the file by its repository
            known = f"{reference.repository}: "
            said = str(error).replace(f"{folder / SOURCE}/", known).replace(f"{folder / SOURCE}: ", known)
            raise UserError(said) from None
        finally:
            if not (folder / STATE).exists():  # it has not begun, or it is done
                shutil.rmtree(folder, ignore_errors=True)
    return package, need


def _snapshot(hub: Hub, reference: Reference, name: str) -> Snapshot:
    """The repository at the commit that an interrupted pull began with, or at the present one."""
    unfinished = unfinished_pull(name)
    if unfinished is not None and unfinished.reference != str(reference):
        raise UserError(
            f"{name}: an interrupted pull of {unfinished.reference} has that name; go on with that one, remove it with "
            f"`neuronpipe rm {name}`, or take another --name"
        )
    return hub.snapshot(reference, None if unfinished is None else unfinished.commit)


@contextmanager
def _opened(
    arrivals: Arrivals, snapshot: Snapshot, reference: Reference, source: Path, options: Options
) -> Iterator[Checkpoint]:
    """The checkpoint, of small files that have come, and of headers that are read at the hub."""
    if reference.file is not None:
        opened = open_gguf(arrivals.path(snapshot.gguf(reference.file)), options, arrivals.open_file)
    else:
        for file in snapshot.small_files(tokenizer=options.tokenizer is None):
            arrivals.bring(file)
        opened = open_huggingface(source, options, arrivals.open_file)
    with opened as checkpoint:
        name = f"{snapshot}:{reference.file}" if reference.file else str(snapshot)
        yield replace(checkpoint, source=replace(checkpoint.source, name=name))


def _prepare(arrivals: Arrivals, snapshot: Snapshot, conversion: Conversion, folder: Path, tally: _Tally) -> Need:
    """What is still to be done, and whether there is room for a shard to come while another one is converted."""
    left = conversion.pieces[conversion.pieces_done(folder) :]
    entries = [cast(ArrivingFile, file).entry for file in conversion.files_from(len(conversion.pieces) - len(left))]
    for entry in entries:
        arrivals.require_checksum(entry)
    download_bytes = sum(entry.bytes - arrivals.here_bytes(entry) for entry in entries)
    whole_bytes = sum(cast(ArrivingFile, file).entry.bytes for file in conversion.files_from(0))
    tally.begin(whole_bytes - download_bytes, whole_bytes)
    there_bytes = bytes_there(folder)
    free_bytes = shutil.disk_usage(folder).free
    small_bytes = bytes_there(folder / SOURCE) - sum(arrivals.here_bytes(entry) for entry in entries)

    def need(ahead: bool) -> Need:
        return Need(
            snapshot=snapshot,
            folder=packages_folder(),
            files=len(entries),
            download_bytes=download_bytes,
            choice=conversion.choice,
            disk_bytes=conversion.package_bytes + most_held_bytes(left, ahead=ahead) + max(small_bytes, 0),
            there_bytes=there_bytes,
            free_bytes=free_bytes,
            goes_on=(folder / STATE).exists(),
        )

    if (roomy := need(True)).missing_bytes == 0:
        arrivals.expect(cast(list[ArrivingFile], _in_order(left)))
        return roomy
    return need(False)


def most_held_bytes(pieces: Sequence[Piece], *, ahead: bool) -> int:
    """The most that files take at one moment while these pieces are converted one after the other: each from the first
    piece that needs it to the last. ahead: and the one that comes next."""
    order = _in_order(pieces)
    most_bytes = 0
    for number in range(len(pieces)):
        begun = _in_order(pieces[: number + 1])
        needed_later = set(_in_order(pieces[number:]))
        held = [file for file in begun if file in needed_later]
        if ahead:
            held += order[len(begun) : len(begun) + 1]
        most_bytes = max(most_bytes, sum(cast(ArrivingFile, file).entry.bytes for file in held))
    return most_bytes


def _in_order(pieces: Sequence[Piece]) -> list[SourceFile]:
    """The files of these pieces, in the order in which they are needed."""
    return list(dict.fromkeys(file for piece in pieces for file in piece.files))


class _Tally:
    """How far a pull is: a byte counts half when it is here, and half when it is converted."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._here_bytes, self._total_bytes, self._converted = 0, 0, 0.0

    def begin(self, here_bytes: int, total_bytes: int) -> None:
        """So much of the weights is here, or was and is converted."""
        self._here_bytes, self._total_bytes = here_bytes, total_bytes

    def arrived(self, more_bytes: int) -> None:
        """From any thread."""
        with self._lock:
            self._here_bytes += more_bytes
            self._tell()

    def converted(self, done: int, total: int) -> None:
        """Of all weights."""
        with self._lock:
            self._converted = done / total
            self._tell()

    def _tell(self) -> None:
        if self._total_bytes:  # not while small files come
            done_bytes = (self._here_bytes + self._converted * self._total_bytes) / 2
            self._progress(int(done_bytes), self._total_bytes)
