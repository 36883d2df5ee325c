"""Checksums of clusters, as the loader verifies them: crc32c (Castagnoli) of each part with its padding."""

from __future__ import annotations

import numpy as np
from neuronpipe.native import ffi, lib
from neuronpipe.plans.package.layout import Layout
from numpy.typing import NDArray


def cluster_checksums(clusters: NDArray[np.uint8], layout: Layout) -> NDArray[np.uint32]:
    """crc32c of trigger part and value part, uint32 [clusters, 2], of contiguous bytes uint8 [clusters, stride]."""
    start = ffi.from_buffer("uint8_t[]", clusters)
    checksums = np.empty((len(clusters), 2), dtype="<u4")
    for cluster in range(len(clusters)):
        gate = start + cluster * layout.cluster_stride_bytes
        checksums[cluster, 0] = lib.np_crc32c(0, gate, layout.trigger_part_bytes)
        checksums[cluster, 1] = lib.np_crc32c(0, gate + layout.trigger_part_bytes, layout.value_part_bytes)
    return checksums
