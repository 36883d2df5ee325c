"""Products of encoded rows and vectors by the native kernels, bit for bit as in the engines."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from neuronpipe.native import ROW_TYPES, ffi, lib
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.writer import Rows
from numpy.typing import NDArray

THREADS = 2
ALIGNMENT_BYTES = 64
BLOCK_ROWS = 512

Array = NDArray[np.float32]


class Vectors:
    """Vectors [tokens, n], prepared once for products with many rows. Threads may share them."""

    def __init__(self, quantization: Quantization, vectors: Array) -> None:
        self._kind, (self._tokens, self._n) = ROW_TYPES[quantization], vectors.shape
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        stride = -(-lib.np_activation_bytes(self._kind, self._n) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        activations = _aligned(self._tokens * stride)
        source, target = ffi.from_buffer("float[]", vectors), ffi.from_buffer("uint8_t[]", activations)
        for token in range(self._tokens):
            lib.np_activation_prepare(self._kind, source + token * self._n, self._n, target + token * stride)
        self._panel = _aligned(lib.np_panel_bytes(self._kind, self._n, self._tokens))
        panel = ffi.from_buffer("uint8_t[]", self._panel)
        lib.np_panel_prepare(self._kind, target, stride, self._tokens, self._n, panel)

    def times(self, rows: Rows) -> Array:
        """Return the products [tokens, rows] with encoded rows of n weights, computed by the calling thread."""
        count = len(rows.quants)
        quants, scales = np.ascontiguousarray(rows.quants), np.ascontiguousarray(rows.scales)
        result = np.empty((self._tokens, count), dtype=np.float32)
        places = [array.ctypes.data + np.arange(count, dtype=np.uintp) * array.shape[1] for array in (quants, scales)]
        quants_at, scales_at = (ffi.cast("void **", ffi.from_buffer(place)) for place in places)
        panel, out = ffi.from_buffer("uint8_t[]", self._panel), ffi.from_buffer("float[]", result)
        lib.np_dot_panel(
            self._kind, quants_at, scales_at, count, self._n, panel, self._tokens, ffi.NULL, out, count
        )  # fmt: skip
        return result


def product(quantization: Quantization, rows: Rows, vectors: Array) -> Array:
    """Return the products [tokens, rows] of vectors [tokens, n] with encoded rows of n weights."""
    prepared = Vectors(quantization, vectors)
    result = np.empty((len(vectors), len(rows.quants)), dtype=np.float32)

    def dot(start: int) -> None:
        columns = slice(start, start + BLOCK_ROWS)
        result[:, columns] = prepared.times(Rows(rows.quants[columns], rows.scales[columns]))

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(dot, range(0, len(rows.quants), BLOCK_ROWS)))
    return result


def _aligned(size_bytes: int) -> NDArray[np.uint8]:
    memory = np.zeros(size_bytes + ALIGNMENT_BYTES, dtype=np.uint8)
    return memory[-memory.ctypes.data % ALIGNMENT_BYTES :][:size_bytes]
