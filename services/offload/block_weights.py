"""The weights of offloaded blocks, read from the package layer by layer; every part's checksum is verified."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
from neuronpipe.native import ffi, lib
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.offloaded_blocks import offloaded_clusters
from neuronpipe.plans.uncached_read import forget
from neuronpipe.protocol.errors import UserError
from numpy.typing import NDArray

READ_BYTES = 4 << 20  # at once, in whole clusters


def offloaded_weights(package: Package, blocks: int) -> Iterator[NDArray[np.uint8]]:
    """Yield for each layer the first clusters of its experts: uint8 [experts * clusters][bytes of both slots].

    The array is reused for the next layer. Raises UserError if the file cannot be read or a
    part does not match its checksum.
    """
    manifest, layout = package.manifest, package.manifest.layout
    model, clusters = manifest.model, offloaded_clusters(layout, blocks)
    checksums = np.frombuffer(package.checksums(), "<u4").reshape(-1, 2)
    cluster_bytes = manifest.trigger_slot_bytes + manifest.value_slot_bytes
    weights = np.empty((model.most_experts * clusters, cluster_bytes), np.uint8)
    file = os.open(package.bundles_path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for layer in range(model.layers):
            for expert, ffn in enumerate(model.ffns_of(layer)):
                first = layout.cluster_index(ffn, 0)
                _read(package, file, first, checksums, weights[expert * clusters : (expert + 1) * clusters])
            yield weights[: model.expert_counts[layer] * clusters]
        forget(file)
    finally:
        os.close(file)


def _read(package: Package, file: int, first: int, checksums: NDArray[np.uint32], into: NDArray[np.uint8]) -> None:
    """Read as many clusters as `into` has rows, from cluster `first` on."""
    manifest, layout = package.manifest, package.manifest.layout
    at_once = max(1, READ_BYTES // layout.cluster_stride_bytes)
    trigger, value = manifest.trigger_slot_bytes, manifest.value_slot_bytes
    start = layout.part_offset("value")
    for at in range(0, len(into), at_once):
        clusters = into[at : at + at_once]
        read = np.empty((len(clusters), layout.cluster_stride_bytes), np.uint8)
        offset = layout.offset_bytes(first + at)
        try:
            count = os.preadv(file, [read.reshape(-1).data], offset)
        except OSError as error:
            raise UserError(f"{package.bundles_path}: cannot be read: {error.strerror}") from None
        if count < read.size:
            raise UserError(f"{package.bundles_path}: ended after {offset + count} bytes; is it being replaced?")
        for cluster, (row, sums) in enumerate(zip(read, checksums[first + at :], strict=False), first + at):
            for name, part, checksum in (("trigger", row[:start], sums[0]), ("value", row[start:], sums[1])):
                if lib.np_crc32c(0, ffi.from_buffer(part), len(part)) != checksum:
                    raise _damaged(package, cluster, name)
        clusters[:, :trigger] = read[:, :trigger]
        clusters[:, trigger:] = read[:, start : start + value]


def _damaged(package: Package, cluster: int, part: str) -> UserError:
    model, layout = package.manifest.model, package.manifest.layout
    ffn, number = divmod(cluster, layout.clusters)
    where = model.name_of(*model.place_of(ffn))
    first, n = number * layout.cluster_neurons, layout.cluster_neurons
    return UserError(
        f"bundles.bin: {where}, neurons {first} to {first + n - 1}: the {part} part does not match its checksum; "
        "convert the model again or copy the package again"
    )


def offloaded_biases(package: Package) -> Iterator[NDArray[np.float32] | None]:
    """Yield for each layer the biases of its up projections, [experts * neurons], or None."""
    for layer in range(package.manifest.model.layers):
        entry = package.fixed.get(f"layers.{layer}.up.bias")
        if entry is None:
            yield None
        else:
            yield np.fromfile(package.fixed_path, np.float32, (entry.stop - entry.start) // 4, offset=entry.start)
