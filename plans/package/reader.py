"""Opens packages: the manifest and the sizes of files are checked at once, contents when they are read."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from neuronpipe.plans.package.activity_profile import Activity
from neuronpipe.plans.package.manifest import (
    ACTIVITY,
    BUNDLES,
    CHAT_TEMPLATE,
    CHECKSUMS,
    FIXED,
    MANIFEST,
    PREDICTOR,
    TOKENIZER,
    Manifest,
)
from neuronpipe.plans.package.parsing.parse import read_manifest, require_package
from neuronpipe.plans.package.safetensors_header import DATA_ALIGNMENT_BYTES, DTYPE_BYTES, TensorEntry, read_header
from neuronpipe.plans.package.source_experts import SHARED
from neuronpipe.plans.package.tensors import fixed_tensors, predictor_tensors
from neuronpipe.plans.uncached_read import BLOCK_BYTES, forget, passing
from neuronpipe.protocol.errors import UserError, quoted, safe_name
from neuronpipe.protocol.frozen import frozen


@frozen
class Package:
    """A package on disk. All methods raise UserError for files that cannot be read or do not match the manifest."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: Path) -> Package:
        """Return the package in a directory, after checking the manifest and the sizes of files. Raises UserError,
        which names the file and the field."""
        require_package(path)
        manifest = read_manifest(path / MANIFEST)
        for name, entry in manifest.files.items():
            file = path / name
            if file.is_symlink():
                raise UserError(f"{file}: is a link, which may lead outside the package; copy the file itself there")
            if not file.is_file():
                raise UserError(f"{file}: missing; convert the model again")
            if (length := file.stat().st_size) != entry.bytes:
                raise UserError(f"{file}: {length} bytes, but the manifest says {entry.bytes}: truncated or replaced")
        if manifest.source_experts is not None:
            manifest.source_experts.require_unchanged()
        return cls(path, manifest)

    @property
    def tokenizer_path(self) -> Path:
        return self.path / TOKENIZER

    @property
    def fixed_path(self) -> Path:
        """Path of fixed.safetensors: attention, norms, embeddings, output and the rope table."""
        return self.path / FIXED

    @property
    def bundles_path(self) -> Path:
        """Path of bundles.bin, which does not exist if experts are read in place."""
        return self.path / BUNDLES

    @property
    def neurons_path(self) -> Path:
        """Path of the file with neurons, for messages: bundles.bin, or the first file with experts."""
        experts = self.manifest.source_experts
        return self.bundles_path if experts is None else Path(experts.files[0].path)

    @property
    def neuron_files(self) -> tuple[Path, ...]:
        """Paths of all files that neurons are read from, in the order of their numbers."""
        experts = self.manifest.source_experts
        if experts is None:
            return (self.bundles_path,)
        of_package = (self.path / SHARED,) if SHARED in self.manifest.files else ()
        return (*(Path(file.path) for file in experts.files), *of_package)

    @property
    def checksums_path(self) -> Path:
        return self.path / CHECKSUMS

    def require_bundles(self, purpose: str) -> None:
        """Raise UserError if experts are read in place. purpose: the part of the message that says what needs them."""
        if self.manifest.source_experts is not None:
            raise UserError(
                f"{self.path}: its experts are read in place from {self.neurons_path}, and {purpose} needs a package "
                f"that has them: `neuronpipe convert {shlex.quote(str(self.neurons_path))} -o PACKAGE`"
            )

    def require_neurons(self, purpose: str) -> None:
        """Raise UserError if Down is stored by output. purpose: the part of the message that says what needs it by
        neuron"""
        if self.manifest.layout.down_by_output:
            source = "SOURCE" if self.manifest.source_experts is None else shlex.quote(str(self.neurons_path))
            what = "experts are" if self.manifest.model.experts > 1 else "feed-forwards are"
            raise UserError(
                f"{self.path}: its {what} stored as wholes, and {purpose} needs them neuron by neuron: "
                f"`neuronpipe convert {source} --by-neuron -o PACKAGE`"
            )

    @cached_property
    def fixed(self) -> dict[str, TensorEntry]:
        """Positions of the fixed tensors in their file: exactly those that the manifest requires."""
        return _checked_tensors(self.fixed_path, fixed_tensors(self.manifest))

    @property
    def embedding_quants(self) -> TensorEntry:
        """Position of the embedding's rows, without their scales, in fixed.safetensors."""
        return self.fixed["embedding.quants"]

    @property
    def predictor_path(self) -> Path:
        """Path of predictor.safetensors, which does not exist if the manifest has no predictor."""
        return self.path / PREDICTOR

    @cached_property
    def predictor(self) -> dict[str, TensorEntry] | None:
        """Positions of the predictor's tensors in their file; None if the package has no predictor."""
        if self.manifest.predictor is None:
            return None
        return _checked_tensors(self.predictor_path, predictor_tensors(self.manifest.model, self.manifest.predictor))

    def verify_fixed(self, *, loaded: Collection[str] = ()) -> None:
        """Raise UserError if a file other than bundles.bin differs from its hash in the manifest.

        loaded: names of files to skip, because `load` compared them

        The header of each file with experts is compared, too.
        """
        if self.manifest.source_experts is not None:
            for file in self.manifest.source_experts.files:
                file.require_header()
        for name, entry in self.manifest.files.items():
            if entry.sha256 is not None and name not in loaded and sha256_of(self.path / name) != entry.sha256:
                raise self._damaged(name)

    def load(
        self,
        name: str,
        into: memoryview,
        *,
        skipped: TensorEntry | None = None,
        pass_rows: Callable[[memoryview], None] = lambda rows: None,
        prepare: Callable[[memoryview], None] = lambda memory: None,
    ) -> None:
        """Read a whole file into memory of its size. Raises UserError if it cannot be read or differs from its hash in
        the manifest.

        skipped: a tensor whose place in memory is not written
        pass_rows: receives the rows of `skipped`, some at a time
        prepare: receives memory that is written next, while earlier pieces are hashed; each byte of it twice
        """
        file, digest, at = self.path / name, hashlib.sha256(), 0
        try:
            # A thread hashes a piece while the next is read: both take about the same time.
            with ThreadPoolExecutor(1) as hashing:
                for piece in passing(file, _targets(into, skipped, prepare)):
                    if skipped is not None and skipped.start <= at < skipped.stop:
                        hashed = hashing.submit(digest.update, piece)
                        pass_rows(piece)
                        hashed.result()  # the next piece has the same memory
                    else:
                        hashing.submit(digest.update, into[at : at + len(piece)])
                    at += len(piece)
        except OSError as error:
            raise UserError(f"{file}: cannot be read: {error.strerror}; convert the model again") from None
        if at < len(into):
            raise UserError(f"{file}: ended after {at} of {len(into)} bytes; is it being replaced?")
        if digest.hexdigest() != self.manifest.files[name].sha256:
            raise self._damaged(name)

    def _damaged(self, name: str) -> UserError:
        return UserError(f"{self.path / name}: does not match the manifest's sha256: damaged; convert the model again")

    def checksums(self) -> bytes:
        """Return checksums.bin: little-endian uint32 [clusters, 2], the CRC-32C of each cluster's trigger part and
        value part."""
        return self._verified(CHECKSUMS)

    def tokenizer(self) -> bytes:
        """Return the content of tokenizer.json."""
        return self._verified(TOKENIZER)

    def chat_template(self) -> str:
        """Return the text of chat_template.jinja. Requires that the manifest has `chat`."""
        try:
            return self._verified(CHAT_TEMPLATE).decode()
        except UnicodeDecodeError:
            raise UserError(f"{self.path / CHAT_TEMPLATE}: not UTF-8 text; convert the model again") from None

    @cached_property
    def activity(self) -> Activity:
        """The content of activity.bin. Requires that the manifest has `profiles`."""
        return self.read_activity()

    def read_activity(self) -> Activity:
        """Return the content of activity.bin. Unlike `activity`, the package does not keep it in memory."""
        return Activity(self.manifest.model, self.manifest.profiles, self._verified(ACTIVITY))

    def _verified(self, name: str) -> bytes:
        """Return a whole file after comparing size and hash with the manifest. Every read compares, since a restarted
        process reads long after the package was opened."""
        file, entry = self.path / name, self.manifest.files[name]
        try:
            with file.open("rb") as opened:
                size_bytes, data = os.fstat(opened.fileno()).st_size, opened.read(entry.bytes)
                forget(opened.fileno())
        except OSError as error:
            raise UserError(f"{file}: cannot be read: {error.strerror}; convert the model again") from None
        if not size_bytes == len(data) == entry.bytes:
            raise UserError(f"{file}: {size_bytes} bytes, but the manifest says {entry.bytes}: truncated or replaced")
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise self._damaged(name)
        return data


def neurons_file(directory: Path) -> Path | None:
    """Return the file with the neurons of the package in a directory: bundles.bin, or the largest of the files in which
    experts are read in place. None if there is no such package or file."""
    if (directory / BUNDLES).is_file():
        return directory / BUNDLES
    try:
        experts = read_manifest(directory / MANIFEST).source_experts
    except UserError:
        return None
    files = [file for file in (() if experts is None else experts.files) if Path(file.path).is_file()]
    return Path(max(files, key=lambda file: file.bytes).path) if files else None


def _targets(
    into: memoryview, skipped: TensorEntry | None, prepare: Callable[[memoryview], None]
) -> Iterator[memoryview]:
    """Yield memory for a file's pieces: blocks of `into`, and for the rows of `skipped` memory that is reused."""
    if skipped is None:
        yield from _blocks(into, 0, len(into), prepare)
        return
    rows = memoryview(bytearray(max(1, BLOCK_BYTES // skipped.row_bytes) * skipped.row_bytes))
    yield from _blocks(into, 0, skipped.start, prepare)
    yield from (rows[: skipped.stop - at] for at in range(skipped.start, skipped.stop, len(rows)))
    yield from _blocks(into, skipped.stop, len(into), prepare)


def _blocks(into: memoryview, start: int, stop: int, prepare: Callable[[memoryview], None]) -> Iterator[memoryview]:
    for at in range(start, stop, BLOCK_BYTES):
        with into[at : min(at + 2 * BLOCK_BYTES, stop)] as ahead:  # a huge page may lie in two blocks
            prepare(ahead)
        with into[at : min(at + BLOCK_BYTES, stop)] as block:
            yield block


def _checked_tensors(path: Path, expected: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, TensorEntry]:
    """Return the positions of the tensors of a safetensors file. Raises UserError if they are not the expected tensors
    (name -> dtype, shape) or not aligned."""
    entries = read_header(path)
    for name in sorted(expected.keys() | entries.keys()):
        actual = (entries[name].dtype, entries[name].shape) if name in entries else None
        if actual != expected.get(name):
            raise UserError(
                f"{path}: {safe_name(name)}: found {_described(actual)}, the manifest needs "
                f"{_described(expected.get(name))}"
            )
    _require_alignment(path, entries)
    return entries


def _require_alignment(path: Path, entries: dict[str, TensorEntry]) -> None:
    """Raise UserError for tensors that are not aligned to their elements: the engine maps them as arrays."""
    data_start = min(entry.start for entry in entries.values())
    if data_start % DATA_ALIGNMENT_BYTES:
        raise UserError(
            f"{path}: header: the data start at byte {data_start}, no multiple of {DATA_ALIGNMENT_BYTES}; "
            "convert the model again"
        )
    for name, entry in entries.items():
        if entry.start % DTYPE_BYTES[entry.dtype]:
            raise UserError(
                f"{path}: {name}: {entry.dtype} at byte {entry.start} is not aligned; convert the model again"
            )


def _described(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "nothing" if tensor is None else f"{tensor[0]} {quoted(list(tensor[1]))}"


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits. Raises UserError if the file cannot be read."""
    digest = hashlib.sha256()
    try:
        for piece in passing(path):
            digest.update(piece)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()
