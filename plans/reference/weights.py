"""The weights of a model as float32 arrays, from a package or a checkpoint."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from neuronpipe.plans.convert.checkpoint import Checkpoint, ffn_name
from neuronpipe.plans.convert.encodings import unpack_gguf
from neuronpipe.plans.convert.quantize import decode
from neuronpipe.plans.convert.stored_tensors import StoredMatrix
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.layout import MatrixPlace, quant_bytes, scale_bytes
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.source_experts import SourceExperts, expert_bytes
from neuronpipe.plans.package.writer import Rows, cluster_checksums
from neuronpipe.protocol.errors import UserError
from numpy.typing import NDArray

Array = NDArray[np.float32]


class Weights(Protocol):
    """The weights of a model. Names are those of fixed.safetensors."""

    model: ModelSpec

    def vector(self, name: str) -> Array:
        """Return a float32 vector by its name."""

    def rows(self, name: str, numbers: NDArray[np.int64]) -> Array:
        """Return some rows of a matrix, [len(numbers), columns]."""

    def matrix(self, name: str) -> Array:
        """Return a matrix, [rows, columns]."""

    def neurons(self, layer: int, expert: int = 0) -> tuple[Array, ...]:
        """Return the matrices of a feed-forward: gate (if any), up and transposed down, [neurons, width]."""


class PackageWeights:
    """The weights of a package, decoded on each call. Neurons are in the package's order. `neurons` raises UserError if
    a checksum does not match."""

    def __init__(self, package: Package) -> None:
        self._package, self._manifest, self.model = package, package.manifest, package.manifest.model
        self._fixed: NDArray[np.uint8] = np.memmap(package.fixed_path, mode="r", dtype=np.uint8)
        self._files: list[NDArray[np.uint8]] = [
            np.memmap(path, mode="r", dtype=np.uint8) for path in package.neuron_files
        ]
        if self._manifest.source_experts is None:
            self._checksums = np.frombuffer(package.checksums(), dtype="<u4").reshape(-1, 2)

    def vector(self, name: str) -> Array:
        entry = self._package.fixed[name]
        return self._fixed[entry.start : entry.stop].view("<f4").astype(np.float32)

    def rows(self, name: str, numbers: NDArray[np.int64]) -> Array:
        quants = self._rows(f"{name}.quants")[numbers]
        quantization = self._manifest.quantization_of(name)
        scales = quants[:, :0] if quantization == "f16" else self._rows(f"{name}.scales")[numbers]
        return decode(quantization, Rows(quants, scales))

    def matrix(self, name: str) -> Array:
        return self.rows(name, np.arange(len(self._rows(f"{name}.quants"))))

    def _rows(self, name: str) -> NDArray[np.uint8]:
        entry = self._package.fixed[name]
        return np.asarray(self._fixed[entry.start : entry.stop].reshape(entry.shape[0], -1))

    def neurons(self, layer: int, expert: int = 0) -> tuple[Array, ...]:
        manifest, layout = self._manifest, self._manifest.layout
        if manifest.source_experts is not None:
            return tuple(self._in_place(manifest.source_experts, place, layer, expert) for place in layout.matrices)
        first = layout.cluster_index(manifest.model.first_ffns[layer] + expert, 0)
        start, stop = layout.offset_bytes(first), layout.offset_bytes(first + layout.clusters)
        clusters = self._files[0][start:stop].reshape(layout.clusters, -1)
        self._require_checksums(clusters, first, layer, expert)
        return tuple(self._in_clusters(clusters, matrix) for matrix in layout.matrices)

    def _in_place(self, experts: SourceExperts, place: MatrixPlace, layer: int, expert: int) -> Array:
        """Return a matrix of an expert that is read in place, with the values that the engine computes with."""
        manifest, run = self._manifest, self.model.run_of(layer, expert)
        stored = experts.matrices[place.name][run]
        count, columns = manifest.layout.rows_and_columns(place.name, self.model.width)
        size_bytes = expert_bytes(stored.encoding, manifest.layout, place.name, self.model.width)
        start = stored.offset + (expert - self.model.runs[run][1]) * (stored.stride or size_bytes)
        source = np.ascontiguousarray(self._files[stored.file][start : start + size_bytes])
        quantization = place.quantization or manifest.quantization
        rows = unpack_gguf(stored.encoding, source.reshape(count, -1), columns, quantization)
        if rows is None:
            raise UserError(f"{self._package.neurons_path}: layer {layer}, expert {expert}: values do not fit: damaged")
        return self._by_neuron(place, decode(quantization, rows))

    def _by_neuron(self, place: MatrixPlace, weights: Array) -> Array:
        if place.name != "down" or not self._manifest.layout.down_by_output:
            return weights
        slices = weights.reshape(-1, self.model.width, weights.shape[1])
        return np.concatenate([of_slice.T for of_slice in slices])

    def _require_checksums(self, clusters: NDArray[np.uint8], first: int, layer: int, expert: int) -> None:
        layout = self._manifest.layout
        wrong = (cluster_checksums(clusters, layout) != self._checksums[first : first + len(clusters)]).any(axis=1)
        if wrong.any():
            cluster, n = int(wrong.argmax()), layout.cluster_neurons
            where = self._manifest.model.name_of(layer, expert)
            raise UserError(
                f"{self._package.bundles_path}: {where}, neurons {cluster * n} to {cluster * n + n - 1}: "
                "does not match its checksum: damaged; convert the model again"
            )

    def _in_clusters(self, clusters: NDArray[np.uint8], place: MatrixPlace) -> Array:
        """Return a matrix of an expert, [neurons, width]. clusters: the expert's, in the form of bundles.bin"""
        layout, quantization = self._manifest.layout, place.quantization or self._manifest.quantization
        count, columns = layout.rows_and_columns(place.name, self.model.width)

        def piece(offset: int, row_bytes: int) -> NDArray[np.uint8]:
            part = clusters[:, offset : offset + count * row_bytes]
            return np.ascontiguousarray(part.reshape(len(clusters) * count, row_bytes))

        rows = Rows(
            piece(layout.part_offset(place.part) + place.quants, quant_bytes(quantization, columns)),
            piece(layout.part_offset(place.scales_part) + place.scales, scale_bytes(quantization, columns)),
        )
        return self._by_neuron(place, decode(quantization, rows))[: self.model.neurons]


class CheckpointWeights:
    """The weights of a checkpoint, read on each call. Neurons are in the source's order."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self.model = checkpoint, checkpoint.model

    def vector(self, name: str) -> Array:
        if name == "rope.inverse_frequency":
            assert self._checkpoint.inverse_frequency is not None, "a model that rotates has frequencies"
            return self._checkpoint.inverse_frequency
        if name == "rope.local_inverse_frequency":
            assert self._checkpoint.local_inverse_frequency is not None, "a model with local positions has frequencies"
            return self._checkpoint.local_inverse_frequency
        return np.concatenate([part.vector() for part in self._checkpoint.vectors[name]])

    def rows(self, name: str, numbers: NDArray[np.int64]) -> Array:
        """Return some rows of a matrix other than qkv, which is several tensors."""
        (stored,) = self._checkpoint.matrices[name]
        return stored.values(numbers)

    def matrix(self, name: str) -> Array:
        return np.concatenate([_values(part) for part in self._checkpoint.matrices[name]])

    def neurons(self, layer: int, expert: int = 0) -> tuple[Array, ...]:
        names = [ffn_name(self.model, f"layers.{layer}", expert, matrix) for matrix in self.model.ffn_matrices]
        *before, down = map(self.matrix, names)
        return *before, down if self._checkpoint.down_by_neuron else np.ascontiguousarray(down.T)


def _values(stored: StoredMatrix) -> Array:
    return stored.values(np.arange(stored.rows))
