"""Writes a package in pieces of any size: tensors by rows, neurons by clusters, the manifest last."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import numpy as np
from neuronpipe.native import ffi, lib
from neuronpipe.plans.package.atomic_output import PartialDirectory, ResumableDirectory, disk_usage_bytes
from neuronpipe.plans.package.byte_pair_tokens import BytePairTokens
from neuronpipe.plans.package.layout import Layout
from neuronpipe.plans.package.manifest import (
    BUNDLES,
    CHAT_TEMPLATE,
    CHECKSUMS,
    FIXED,
    MANIFEST,
    PREDICTOR,
    TOKENIZER,
    FileEntry,
    Manifest,
)
from neuronpipe.plans.package.reader import Package, sha256_of
from neuronpipe.plans.package.safetensors_header import build_header, file_bytes
from neuronpipe.plans.package.source_experts import SHARED, shared_bytes
from neuronpipe.plans.package.tensors import fixed_tensors, predictor_tensors
from neuronpipe.protocol.errors import UserError
from numpy.typing import NDArray

CHECKSUM_BYTES = 8  # per cluster: one sum for the trigger part, one for the value part


class Rows(NamedTuple):
    """Encoded rows of a matrix: quants [rows, quant bytes], scales [rows, scale bytes]; f16 has 0 scale bytes."""

    quants: NDArray[np.uint8]
    scales: NDArray[np.uint8]


def pack_clusters(layout: Layout, matrices: Sequence[Rows]) -> NDArray[np.uint8]:
    """Return clusters in the form of bundles.bin, uint8 [clusters, stride]. Zeros pad the last cluster.

    matrices: the rows of as many neurons for each of the layout's matrices; with Down by output those of whole slices
    """
    clusters = -(-len(matrices[0].quants) // layout.cluster_neurons)
    packed = np.zeros((clusters, layout.cluster_stride_bytes), dtype=np.uint8)
    for place, rows in zip(layout.matrices, matrices, strict=True):
        is_by_output = layout.down_by_output and place.name == "down"
        count = len(rows.quants) // clusters if is_by_output else layout.cluster_neurons
        for piece, offset in (
            (rows.quants, layout.part_offset(place.part) + place.quants),
            (rows.scales, layout.part_offset(place.scales_part) + place.scales),
        ):
            filled = np.zeros((clusters * count, piece.shape[1]), dtype=np.uint8)
            filled[: len(piece)] = piece
            packed[:, offset : offset + count * piece.shape[1]] = filled.reshape(clusters, -1)
    return packed


def cluster_checksums(clusters: NDArray[np.uint8], layout: Layout) -> NDArray[np.uint32]:
    """Return the CRC-32C of each cluster's trigger part and value part, [clusters, 2].

    clusters: contiguous [clusters, stride]
    """
    start = ffi.from_buffer("uint8_t[]", clusters)
    checksums = np.empty((len(clusters), 2), dtype="<u4")
    for cluster in range(len(clusters)):
        trigger = start + cluster * layout.cluster_stride_bytes
        checksums[cluster, 0] = lib.np_crc32c(0, trigger, layout.trigger_part_bytes)
        checksums[cluster, 1] = lib.np_crc32c(0, trigger + layout.trigger_part_bytes, layout.value_part_bytes)
    return checksums


def package_bytes(manifest: Manifest) -> int:
    """Return the size of a package's tensors, neurons and checksums on disk."""
    stride_bytes = 0 if manifest.source_experts is not None else manifest.layout.cluster_stride_bytes
    tensors_bytes = sum(file_bytes(tensors) for tensors in _tensor_files(manifest).values())
    own_bytes = shared_bytes(manifest.source_experts, manifest.model, manifest.layout)
    return tensors_bytes + manifest.clusters * (stride_bytes + CHECKSUM_BYTES) + own_bytes


def _tensor_files(manifest: Manifest) -> dict[str, dict[str, tuple[str, tuple[int, ...]]]]:
    files = {FIXED: fixed_tensors(manifest)}
    if manifest.predictor is not None:
        files[PREDICTOR] = predictor_tensors(manifest.model, manifest.predictor)
    return files


class _TensorFile:
    """A safetensors file whose tensors are written in pieces of any size, each tensor from its start on."""

    def __init__(self, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
        self._header, self._entries = build_header(tensors)
        self._position = {name: entry.start for name, entry in self._entries.items()}
        self.bytes = max(entry.stop for entry in self._entries.values())

    def begin(self, file: BinaryIO) -> None:
        """Write the header. file: new, or an interrupted one."""
        self._file = file
        file.write(self._header)

    def resume_after(self, names: Collection[str]) -> None:
        """Continue an interrupted file. names: matrices and vectors that are complete; others are written again."""
        for name, entry in self._entries.items():
            written = name.removesuffix(".quants").removesuffix(".scales") in names
            self._position[name] = entry.stop if written else entry.start
        self._file.truncate(self.bytes)

    def append(self, name: str, data: NDArray[np.generic]) -> None:
        """Write the next bytes of a tensor. Raises ValueError if they exceed its shape."""
        start = self._position[name]
        self._position[name] = start + data.nbytes
        if self._position[name] > self._entries[name].stop:
            raise ValueError(f"{name}: more bytes than its shape holds")
        self._file.seek(start)
        self._file.write(np.ascontiguousarray(data).data)

    def matrix(self, name: str, rows: Rows) -> None:
        self.append(f"{name}.quants", rows.quants)
        if rows.scales.size:
            self.append(f"{name}.scales", rows.scales)

    def missing(self) -> list[str]:
        """Return the names of tensors that are not complete."""
        return [name for name, entry in self._entries.items() if self._position[name] != entry.stop]


class PackageWriter:
    """A context manager that writes one package.

    Write the rows of every fixed tensor and of the predictor, if the manifest has one, in order, and all clusters in
    order, unless experts are read in place; then call `complete` and `publish`. Raises UserError for errors of the file
    system, including too little space. Without `publish`, the files are removed at exit, unless there is a `place`.

    To continue after a kill: call `sync` and record how much is written. Pass this to `resume_after` of the next
    writer.

    manifest: without files, errors and id, which `complete` adds
    place: the folder to write in, which stays until it is published; None: a new one beside `target`
    overwrite, can_resume: as in `PartialDirectory`; a `place` ignores can_resume
    """

    def __init__(
        self,
        target: Path,
        manifest: Manifest,
        *,
        overwrite: bool,
        place: Path | None = None,
        can_resume: Callable[[Path], bool] = lambda folder: False,
    ) -> None:
        self._target, self._manifest = target, manifest
        self._directory = (
            PartialDirectory(target, overwrite=overwrite, can_resume=can_resume)
            if place is None
            else ResumableDirectory(target, place, overwrite=overwrite)
        )
        self._tensors = {name: _TensorFile(tensors) for name, tensors in _tensor_files(manifest).items()}
        self._clusters = 0
        self._in_place = manifest.source_experts is not None
        self._neuron_files: tuple[str, ...] = (BUNDLES, CHECKSUMS)
        if self._in_place:
            self._neuron_files = (SHARED, CHECKSUMS) if manifest.model.experts_differ else (CHECKSUMS,)

    def __enter__(self) -> PackageWriter:
        with ExitStack() as stack:
            stack.push(self._explain)
            path = stack.enter_context(self._directory).path
            self._require_space(path)
            if self._in_place:  # neither neurons nor checksums of an interrupted conversion with its own experts
                (path / BUNDLES).unlink(missing_ok=True)
                (path / CHECKSUMS).unlink(missing_ok=True)
            self._files: dict[str, BinaryIO] = {
                name: stack.enter_context((path / name).open("r+b" if (path / name).exists() else "wb"))
                for name in (*self._tensors, *self._neuron_files)
            }
            for name, tensors in self._tensors.items():
                tensors.begin(self._files[name])
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @property
    def path(self) -> Path:
        return self._directory.path

    def _explain(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            is_kept = isinstance(self._directory, ResumableDirectory)
            suffix = "; what is done of it is kept" if is_kept else " and was removed"
            raise UserError(f"{self._target}: the package could not be written{suffix}: {error.strerror}") from None

    def _require_space(self, path: Path) -> None:
        needed_bytes = package_bytes(self._manifest) - disk_usage_bytes(path)
        if (free := shutil.disk_usage(path).free) < needed_bytes:
            raise UserError(
                f"{self._target}: the package needs {needed_bytes:,} bytes, but {free:,} are free on that disk"
            )

    def resume_after(self, names: Collection[str], clusters: int) -> None:
        """Continue an interrupted package. Raises UserError if the files are shorter than they were.

        names: matrices and vectors that are complete; others are written again
        clusters: number of clusters that are complete; later ones are discarded
        """
        for tensors in self._tensors.values():
            tensors.resume_after(names)
        if self._in_place:
            return
        self._clusters = clusters
        for file, cluster_bytes in (
            (self._files[BUNDLES], self._manifest.layout.cluster_stride_bytes),
            (self._files[CHECKSUMS], CHECKSUM_BYTES),
        ):
            if file.seek(0, os.SEEK_END) < clusters * cluster_bytes:
                raise UserError(f"{file.name}: shorter than the {clusters} clusters it had; remove it and start again")
            file.truncate(clusters * cluster_bytes)
            file.seek(0, os.SEEK_END)

    def sync(self) -> None:
        """Wait until everything written so far is on disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def matrix(self, name: str, rows: Rows) -> None:
        """Write the next rows of a matrix of fixed.safetensors."""
        self._tensors[FIXED].matrix(name, rows)

    def vector(self, name: str, values: NDArray[np.float32]) -> None:
        """Write a whole float32 vector of fixed.safetensors."""
        self._tensors[FIXED].append(name, values.astype("<f4", copy=False))

    def predictor_matrix(self, name: str, rows: Rows) -> None:
        self._tensors[PREDICTOR].matrix(name, rows)

    def predictor_vector(self, name: str, values: NDArray[np.float32]) -> None:
        self._tensors[PREDICTOR].append(name, values.astype("<f4", copy=False))

    def neurons(self, *matrices: Rows) -> None:
        """Write the next neurons of an expert: whole clusters, or the last neurons of the expert.

        matrices: their rows, in the layout's order of matrices; with Down by output those of whole slices
        """
        packed = pack_clusters(self._manifest.layout, matrices)
        self._files[BUNDLES].write(packed.data)
        self._files[CHECKSUMS].write(cluster_checksums(packed, self._manifest.layout).data)
        self._clusters += len(packed)

    def shared_rows(self, offset: int, rows: NDArray[np.uint8]) -> None:
        """Write rows of experts that compute every token into shared.bin. offset: their place in the file"""
        file = self._files[SHARED]
        file.seek(offset)
        file.write(np.ascontiguousarray(rows).data)

    def complete(
        self,
        tokenizer: bytes,
        quantization_error: dict[str, float],
        chat_template: str | None = None,
        **measured: tuple[float, ...],
    ) -> Package:
        """Write the remaining files, the manifest last, and return the package, which is not published yet.

        quantization_error: the field of Manifest
        measured: firing shares by layer, by the names of Manifest's fields

        Raises ValueError if tensors or clusters are missing.
        """
        missing = [name for tensors in self._tensors.values() for name in tensors.missing()]
        if self._in_place:  # checksums are not known yet; no hole, since the loader writes to a mapping of the file
            self._files[CHECKSUMS].write(bytes(self._manifest.clusters * CHECKSUM_BYTES))
            self._clusters = self._manifest.clusters
        if missing or self._clusters != self._manifest.clusters:
            raise ValueError(f"incomplete: {missing[:3]}, {self._clusters} of {self._manifest.clusters} clusters")
        for file in self._files.values():
            file.close()
        path, unhashed = self._directory.path, CHECKSUMS if self._in_place else BUNDLES
        texts = {TOKENIZER: tokenizer} | ({} if chat_template is None else {CHAT_TEMPLATE: chat_template.encode()})
        for name, text in texts.items():
            (path / name).write_bytes(text)
        files = {
            name: FileEntry((path / name).stat().st_size, None if name == unhashed else sha256_of(path / name))
            for name in (*texts, *self._files)
        }
        compact = BytePairTokens.open(tokenizer) is not None
        manifest = replace(
            self._manifest, files=files, quantization_error=quantization_error, compact_tokenizer=compact
        )
        manifest = replace(manifest, **measured).sealed()  # type: ignore[arg-type]
        (path / MANIFEST).write_bytes(manifest.to_bytes())
        return Package.open(path)

    def publish(self) -> Package:
        """Rename the package to its target and return it."""
        self._directory.publish()
        return Package.open(self._target)
