"""Encodings of a row of weights in source files, by the names of safetensors and GGUF, and their decoding."""

from __future__ import annotations

import numpy as np
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.writer import Rows
from numpy.typing import NDArray

PLAIN_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
BLOCK_WEIGHTS_BYTES = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
}
ENCODINGS = (*PLAIN_BYTES, *BLOCK_WEIGHTS_BYTES)


def row_bytes(encoding: str, columns: int) -> int | None:
    """Return the bytes of a row, or None if the encoding's blocks do not divide it."""
    if encoding in PLAIN_BYTES:
        return columns * PLAIN_BYTES[encoding]
    block_weights, block_bytes = BLOCK_WEIGHTS_BYTES[encoding]
    return None if columns % block_weights else columns // block_weights * block_bytes


def decode_stored(encoding: str, stored: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Decode the stored bytes uint8 [rows, row bytes] to float32 [rows, columns]."""
    if encoding == "F32":
        return stored.view("<f4").astype(np.float32, copy=False)
    if encoding == "F16":
        return stored.view("<f2").astype(np.float32)
    if encoding == "BF16":
        return (stored.view("<u2").astype(np.uint32) << 16).view(np.float32)
    # The library is slow to import, and most conversions have plain weights.
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    decoded: NDArray[np.float32] = dequantize(stored, GGMLQuantizationType[encoding])
    return decoded


def same_encoding(encoding: str, quantization: Quantization, stored: NDArray[np.uint8]) -> Rows | None:
    """Return the stored rows without decoding, if the source's encoding is the package's own apart from the place of
    scales."""
    if encoding == "F16" and quantization == "f16":
        return Rows(stored, np.empty((len(stored), 0), dtype=np.uint8))
    if (encoding, quantization) not in (("Q4_0", "q4"), ("Q8_0", "q8")):
        return None
    blocks = stored.reshape(len(stored), -1, BLOCK_WEIGHTS_BYTES[encoding][1])
    return Rows(blocks[..., 2:].reshape(len(stored), -1), blocks[..., :2].reshape(len(stored), -1))
