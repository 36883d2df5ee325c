"""Encodings of a row of weights in source files, by the names of safetensors and GGUF, and their decoding."""

from __future__ import annotations

import numpy as np
from neuronpipe.plans.convert.quantize import pack_codes, pack_fields
from neuronpipe.plans.package.layout import BITS, GROUP_WEIGHTS, MINIMUM_QUANTIZATIONS, Quantization
from neuronpipe.plans.package.writer import Rows
from neuronpipe.plans.quantization_choice import LOSSLESS
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


def same_values(encoding: str, quantization: Quantization, stored: NDArray[np.uint8]) -> Rows | None:
    """Return the stored rows in the package's quantization without decoding them, if it can express their values; else
    None."""
    if encoding == "F16" and quantization == "f16":
        return Rows(stored, np.empty((len(stored), 0), dtype=np.uint8))
    if encoding in ("Q4_K", "Q5_K"):
        fits = quantization in MINIMUM_QUANTIZATIONS and BITS[quantization] >= BITS[LOSSLESS[encoding]]
        return _with_minima(encoding, BITS[quantization], stored) if fits else None
    if LOSSLESS.get(encoding) != quantization:
        return None
    blocks = stored.reshape(len(stored), -1, BLOCK_WEIGHTS_BYTES[encoding][1])
    return Rows(blocks[..., 2:].reshape(len(stored), -1), blocks[..., :2].reshape(len(stored), -1))


def _with_minima(encoding: str, bits: int, stored: NDArray[np.uint8]) -> Rows:
    """Return rows of Q4_K or Q5_K as q4k, q5k or q6k, whose codes have at least as many bits.

    A block of 256 weights is: fp16 of the scales, fp16 of the minima, 12 bytes with eight six-bit scales and minima,
    for Q5_K 32 bytes whose bit g of byte j is the fifth bit of code j of group g, and 128 bytes of low four bits: byte
    32 i + j has code j of the groups 2 i (low nibble) and 2 i + 1.
    """
    blocks = stored.reshape(len(stored), -1, BLOCK_WEIGHTS_BYTES[encoding][1])
    packed, lows = blocks[..., 4:16], blocks[..., -128:].reshape(*blocks.shape[:2], 4, 32)
    codes = np.stack((lows & 15, lows >> 4), axis=3).reshape(len(stored), -1, GROUP_WEIGHTS)
    if encoding == "Q5_K":
        fifths = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
        codes = codes | fifths.reshape(codes.shape) << 4
    first, second, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    fields = np.stack(
        (
            np.concatenate((first & 63, high & 15 | first >> 6 << 4), axis=2),
            np.concatenate((second & 63, high >> 4 | second >> 6 << 4), axis=2),
        )
    )
    scales = np.concatenate((blocks[..., :4], pack_fields(*fields)), axis=2)
    return Rows(pack_codes(codes, bits), scales.reshape(len(stored), -1))
