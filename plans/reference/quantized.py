"""Products of encoded rows and vectors with the bits of the engines: int8 activations for q8 and q4, native kernels."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from neuronpipe.native import ffi, lib
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.writer import Rows
from numpy.typing import NDArray

TYPES = {"f16": lib.NP_F16, "q8": lib.NP_Q8, "q4": lib.NP_Q4}
THREADS = 2
ALIGNMENT_BYTES = 64
BLOCK_ROWS = 512

Array = NDArray[np.float32]


def product(quantization: Quantization, rows: Rows, vectors: Array) -> Array:
    """float32 [tokens, rows] of vectors float32 [tokens, n] and encoded rows of n weights."""
    kind, (tokens, n) = TYPES[quantization], vectors.shape
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    quants, scales = np.ascontiguousarray(rows.quants), np.ascontiguousarray(rows.scales)
    stride = -(-lib.np_activation_bytes(kind, n) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    memory = np.zeros(tokens * stride + ALIGNMENT_BYTES, dtype=np.uint8)
    activations = memory[-memory.ctypes.data % ALIGNMENT_BYTES :][: tokens * stride]
    source, target = ffi.from_buffer("float[]", vectors), ffi.from_buffer("uint8_t[]", activations)
    result = np.empty((tokens, len(quants)), dtype=np.float32)
    out = ffi.from_buffer("float[]", result)
    quant_start, scale_start = ffi.from_buffer("uint8_t[]", quants), ffi.from_buffer("uint8_t[]", scales)

    def prepare(start: int) -> None:
        for token in range(start, min(start + BLOCK_ROWS, tokens)):
            lib.np_activation_prepare(kind, source + token * n, n, target + token * stride)

    def dot(start: int) -> None:
        count = min(BLOCK_ROWS, len(quants) - start)
        quant_place = quant_start + start * quants.shape[1]
        scale_place = scale_start + start * scales.shape[1]
        lib.np_dot_rows(
            kind, quant_place, scale_place, count, n, target, stride, tokens, ffi.NULL, out + start, len(quants)
        )

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(prepare, range(0, tokens, BLOCK_ROWS)))
        list(pool.map(dot, range(0, len(quants), BLOCK_ROWS)))
    return result
