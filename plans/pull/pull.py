"""A pull: first determines the requirements from small files and headers, then downloads and converts at the same time.

A shard is one of the files with weights; the parts of a GGUF model are its shards. While a shard is converted, the next
one is downloaded. A shard is deleted when no later layer needs it. Every layer needs the file of a model with only one.
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
from neuronpipe.plans.convert.gguf.gguf_model import open_gguf
from neuronpipe.plans.convert.huggingface import open_huggingface
from neuronpipe.plans.convert.source_file import SourceFile
from neuronpipe.plans.package.atomic_output import disk_usage_bytes
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.pull.downloads import DownloadedFile, Downloads
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
from neuronpipe.plans.quantization_choice import Choice, RequestedQuantization
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

SOURCE = "source"  # in the folder of a pull: the downloaded files


@frozen(kw_only=True)
class Need:
    """The requirements of a pull.

    files: number of files with weights that the conversion still needs
    download_bytes: bytes of these that are not on this disk
    disk_bytes: maximal disk usage during the pull, including present_bytes
    present_bytes: disk usage of the working folder now
    resumes: the pull continues an interrupted one
    """

    snapshot: Snapshot
    folder: Path
    files: int
    download_bytes: int
    choice: Choice
    disk_bytes: int
    present_bytes: int
    free_bytes: int
    resumes: bool

    @property
    def missing_bytes(self) -> int:
        return max(self.disk_bytes - self.present_bytes - self.free_bytes, 0)


def pull(
    reference: Reference,
    name: str,
    *,
    quantization: RequestedQuantization | None,
    gates: Quantization | None,
    by_neuron: bool = False,
    options: Options,
    overwrite: bool,
    command: Sequence[str],
    agree: Callable[[Need], None],
    progress: Progress,
    report: Report | None = None,
    tell: Tell = lambda line: None,
) -> tuple[Package, Need]:
    """Download and convert a repository's model to the package `name`. Return the package and the requirements.

    options, quantization, gates, by_neuron, overwrite: as in `convert`
    command: the words of the command that continues the pull
    agree: is called with the requirements before weights are downloaded; raises UserError to cancel the pull
    tell: is called with a line about the reason if the hub asks to wait

    Raises UserError for errors of model, hub, network or disk. Errors before `agree` has returned remove the working
    folder, unless the pull continues an interrupted one. After later errors and interruptions the downloaded files
    stay, and the next pull of the same reference continues.
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
                Downloads(hub, snapshot, folder / SOURCE, tally.arrived) as downloads,
                _opened(downloads, snapshot, reference, folder / SOURCE, options) as checkpoint,
            ):
                conversion = Conversion(
                    checkpoint, quantization=quantization, gates=gates, by_neuron=by_neuron, name=name
                )
                need = _prepare(downloads, snapshot, conversion, folder, tally)
                agree(need)
                begin(folder, Unfinished(str(reference), snapshot.commit, tuple(command)))
                package = conversion.write(
                    target, overwrite=overwrite, progress=tally.converted, report=report, place=folder
                )
            (folder / STATE).unlink()
        except UserError as error:  # the user knows files by their repository, not by the working folder
            where = f"{reference.repository}: "
            message = str(error).replace(f"{folder / SOURCE}/", where).replace(f"{folder / SOURCE}: ", where)
            raise UserError(message) from None
        finally:
            if not (folder / STATE).exists():  # the pull has not begun, or is complete
                shutil.rmtree(folder, ignore_errors=True)
    return package, need


def _snapshot(hub: Hub, reference: Reference, name: str) -> Snapshot:
    """Return the repository at the commit of the interrupted pull, or at the current one. Raises UserError if the
    interrupted pull is of another model."""
    unfinished = unfinished_pull(name)
    if unfinished is not None and unfinished.reference != str(reference):
        raise UserError(
            f"{name}: an interrupted pull of {unfinished.reference} has that name; go on with that one, remove it with "
            f"`neuronpipe rm {name}`, or take another --name"
        )
    return hub.snapshot(reference, None if unfinished is None else unfinished.commit)


@contextmanager
def _opened(
    downloads: Downloads, snapshot: Snapshot, reference: Reference, source: Path, options: Options
) -> Iterator[Checkpoint]:
    if reference.file is not None:
        opened = open_gguf(downloads.path(snapshot.gguf(reference.file)), options, downloads.open_file)
    else:
        for file in snapshot.small_files(tokenizer=options.tokenizer is None):
            downloads.download_file(file)
        opened = open_huggingface(source, options, downloads.open_file)
    with opened as checkpoint:
        name = f"{snapshot}:{reference.file}" if reference.file else str(snapshot)
        yield replace(checkpoint, source=replace(checkpoint.source, name=name))


def _prepare(downloads: Downloads, snapshot: Snapshot, conversion: Conversion, folder: Path, tally: _Tally) -> Need:
    """Return the requirements of the rest of the pull. If there is room, let each shard be downloaded during the
    conversion of the one before."""
    left = conversion.pieces[conversion.pieces_done(folder) :]
    entries = [cast(DownloadedFile, file).entry for file in conversion.files_from(len(conversion.pieces) - len(left))]
    for entry in entries:
        downloads.require_checksum(entry)
    download_bytes = sum(entry.bytes - downloads.local_bytes(entry) for entry in entries)
    whole_bytes = sum(cast(DownloadedFile, file).entry.bytes for file in conversion.files_from(0))
    tally.begin(whole_bytes - download_bytes, whole_bytes)
    present_bytes = disk_usage_bytes(folder)
    free_bytes = shutil.disk_usage(folder).free
    small_bytes = disk_usage_bytes(folder / SOURCE) - sum(downloads.local_bytes(entry) for entry in entries)

    def need(ahead: bool) -> Need:
        return Need(
            snapshot=snapshot,
            folder=packages_folder(),
            files=len(entries),
            download_bytes=download_bytes,
            choice=conversion.choice,
            disk_bytes=conversion.package_bytes + peak_bytes(left, ahead=ahead) + max(small_bytes, 0),
            present_bytes=present_bytes,
            free_bytes=free_bytes,
            resumes=(folder / STATE).exists(),
        )

    if (roomy := need(True)).missing_bytes == 0:
        downloads.expect(cast(list[DownloadedFile], _in_order(left)))
        return roomy
    return need(False)


def peak_bytes(pieces: Sequence[Piece], *, ahead: bool) -> int:
    """Return the maximal size of the source files on the disk while `pieces` are converted in order. A file is there
    from the first piece that needs it to the last.

    ahead: the next file is also there
    """
    order = _in_order(pieces)
    max_bytes = 0
    for number in range(len(pieces)):
        begun = _in_order(pieces[: number + 1])
        needed_later = set(_in_order(pieces[number:]))
        present = [file for file in begun if file in needed_later]
        if ahead:
            present += order[len(begun) : len(begun) + 1]
        max_bytes = max(max_bytes, sum(cast(DownloadedFile, file).entry.bytes for file in present))
    return max_bytes


def _in_order(pieces: Sequence[Piece]) -> list[SourceFile]:
    return list(dict.fromkeys(file for piece in pieces for file in piece.files))


class _Tally:
    """The progress of a pull. A byte counts half when it is downloaded, and half when it is converted."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._local_bytes, self._total_bytes, self._converted = 0, 0, 0.0

    def begin(self, local_bytes: int, total_bytes: int) -> None:
        """Set the size of all shards, and the bytes of those that need no download, including converted shards."""
        self._local_bytes, self._total_bytes = local_bytes, total_bytes

    def arrived(self, more_bytes: int) -> None:
        """Count downloaded bytes. Any thread may call this."""
        with self._lock:
            self._local_bytes += more_bytes
            self._tell()

    def converted(self, done: int, total: int) -> None:
        """Set the number of converted weights and of all weights."""
        with self._lock:
            self._converted = done / total
            self._tell()

    def _tell(self) -> None:
        if self._total_bytes:  # 0 while small files are downloaded
            done_bytes = (self._local_bytes + self._converted * self._total_bytes) / 2
            self._progress(int(done_bytes), self._total_bytes)
