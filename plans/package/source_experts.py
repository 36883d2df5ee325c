"""Experts that a package reads in place: it has the rest of the model, and says where a GGUF file has the experts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from neuronpipe.native import lib
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.layout import PAGE_BYTES, Layout, pages
from neuronpipe.plans.strict_json import Record
from neuronpipe.plans.uncached_read import passing
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

MATRICES = ("gate", "up", "down")
SHARED = "shared.bin"  # the package's own file with rows of experts that compute every token
MAGIC = b"GGUF"
MAX_FILES = 1000
MAX_FILE_BYTES = 1 << 47  # the loader's offsets have 48 bits for the place in a file
MAX_HEADER_BYTES = 128 << 20
MAX_PATH_BYTES = 4096
GGUF_TYPES: Mapping[str, int] = {
    name.removeprefix("NP_GGUF_"): getattr(lib, name) for name in dir(lib) if name.startswith("NP_GGUF_")
}
"""The numbers of the encodings that experts in place may have, by name."""


@frozen(slots=True)
class SourceEntry:
    """A file with experts, and what identifies its content.

    path: absolute
    modified_ns: time of its last modification, in nanoseconds since 1970
    header_bytes, header_sha256: length and hash of its beginning, which describes its tensors
    """

    path: str
    bytes: int
    modified_ns: int
    header_bytes: int
    header_sha256: str

    @classmethod
    def of(cls, path: Path, header_bytes: int) -> SourceEntry:
        """Return the entry of a file. Raises UserError if it cannot be read."""
        try:
            status = path.stat()
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        absolute = os.path.realpath(path)
        digest = header_digest(Path(absolute), header_bytes)
        return cls(absolute, status.st_size, status.st_mtime_ns, header_bytes, digest)

    def require_unchanged(self) -> None:
        """Raise UserError if the file is not there, or its size or time of modification differs."""
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be read: {error.strerror}; a package reads its experts from that file: put it "
                "back, or remove the package"
            ) from None
        if (status.st_size, status.st_mtime_ns) != (self.bytes, self.modified_ns):
            raise UserError(f"{self.path}: {CHANGED}")

    def require_header(self) -> None:
        """Raise UserError if the header's hash differs."""
        if header_digest(Path(self.path), self.header_bytes) != self.header_sha256:
            raise UserError(f"{self.path}: {CHANGED}")


CHANGED = (
    "has changed since a package was made of it, which reads its experts from this file; name the file instead of the "
    "package, and a new one is made"
)


def header_digest(path: Path, header_bytes: int) -> str:
    """Return the SHA-256 of the first bytes of a GGUF file. Raises UserError if it cannot be read, is shorter, or is
    another file: a stranger's manifest must not have others read."""
    digest, left = hashlib.sha256(), header_bytes
    try:
        for piece in passing(path):
            if left == header_bytes and piece[:4] != MAGIC:
                raise UserError(f"{path}: is not GGUF; experts are read in place from GGUF files only")
            digest.update(piece[:left])
            left -= min(left, len(piece))
            if not left:
                return digest.hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    raise UserError(f"{path}: ends within its header: truncated")


@frozen(slots=True)
class SourceRows:
    """Position of a matrix's rows of a run of experts.

    file: number in `SourceExperts.files`; the number after the last one is the package's own shared.bin
    offset: position of the first expert's rows
    encoding: GGUF's name
    stride: bytes from one expert's rows to those of the next; 0: they follow one another
    """

    file: int
    offset: int
    encoding: str
    stride: int = 0

    def end(self, experts: int, size_bytes: int) -> int:
        """Return the position behind the rows of a run of experts. size_bytes: the bytes of one expert's rows"""
        return self.offset + (experts - 1) * (self.stride or size_bytes) + size_bytes


@frozen(slots=True)
class SourceExperts:
    """Positions of all experts; matrices: by name, then run (`ModelSpec.runs`)."""

    files: tuple[SourceEntry, ...]
    matrices: Mapping[str, tuple[SourceRows, ...]]

    def require_unchanged(self) -> None:
        """Raise UserError if a file is not there, or its size or time of modification differs."""
        for file in self.files:
            file.require_unchanged()

    def fault(self, run: int, where: str) -> str:
        """Return why an expert of a run could not be read. where: the expert, for people."""
        try:
            self.require_unchanged()
        except UserError as error:
            return str(error)
        numbers = dict.fromkeys(runs[run].file for runs in self.matrices.values())
        paths = [self.files[number].path if number < len(self.files) else SHARED for number in numbers]
        return (
            f"{', '.join(paths)}: {where}: cannot be read, is damaged, or differs from the first read; if the file "
            "is intact, remove the package of it and name the file again"
        )


def expert_bytes(encoding: str, layout: Layout, matrix: str, width: int) -> int:
    """Return the bytes of one expert's rows of a matrix in a file; 0 if rows are no whole number of blocks."""
    rows, columns = layout.rows_and_columns(matrix, width)
    row_bytes: int = lib.np_gguf_row_bytes(GGUF_TYPES[encoding], columns)
    return rows * row_bytes


def shared_bytes(experts: SourceExperts | None, model: ModelSpec, layout: Layout) -> int:
    """Return the length of shared.bin, which is 0 if there is none."""
    if experts is None:
        return 0
    ends = (
        rows.end(model.runs[run][2], expert_bytes(rows.encoding, layout, matrix, model.width))
        for matrix, runs in experts.matrices.items()
        for run, rows in enumerate(runs)
        if rows.file == len(experts.files)
    )
    return max(ends, default=0)


def read_bytes(size_bytes: int) -> int:
    """Return the most bytes of whole pages that hold `size_bytes` bytes, wherever they begin; a multiple of a page."""
    return (pages(size_bytes) + 1) * PAGE_BYTES


def parse_source_experts(record: Record, runs: int, shared_bytes: int | None) -> SourceExperts:
    """Return the section `source_experts` of a manifest. Raises UserError for values that are out of range.

    runs: number of runs of experts
    shared_bytes: length of shared.bin; None: the package has none
    """
    files = tuple(_parse_file(file) for file in record.records("files"))
    if not 1 <= len(files) <= MAX_FILES:
        record.fail("files", f"{len(files)} files; expected 1 to {MAX_FILES}")
    by_name = record.record("matrices")
    matrices = {}
    for name in MATRICES:
        lengths = [file.bytes for file in files] + ([] if shared_bytes is None else [shared_bytes])
        rows = tuple(_parse_rows(of_run, lengths) for of_run in by_name.records(name))
        if len(rows) != runs:
            by_name.fail(name, f"{len(rows)} runs of experts, but the model has {runs}")
        matrices[name] = rows
    by_name.finish()
    record.finish()
    return SourceExperts(files, matrices)


def _parse_file(record: Record) -> SourceEntry:
    path = record.text("path")
    if not os.path.isabs(path) or "\0" in path or len(os.fsencode(path)) > MAX_PATH_BYTES:
        record.fail("path", "expected the absolute path of a file")
    bytes_ = record.integer("bytes", 1, MAX_FILE_BYTES)
    entry = SourceEntry(
        path,
        bytes_,
        record.integer("modified_ns", -(1 << 62), 1 << 62),
        record.integer("header_bytes", 1, min(bytes_, MAX_HEADER_BYTES)),
        record.text("header_sha256"),
    )
    record.finish()
    return entry


def _parse_rows(record: Record, lengths: list[int]) -> SourceRows:
    file = record.integer("file", 0, len(lengths) - 1)
    rows = SourceRows(
        file,
        record.integer("offset", 0, lengths[file]),
        record.choice("encoding", *GGUF_TYPES),
        record.integer("stride", 1, lengths[file]) if record.has("stride") else 0,
    )
    record.finish()
    return rows
