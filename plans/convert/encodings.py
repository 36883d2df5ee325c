"""Encodings of rows of weights in source files, named as in safetensors and GGUF, and their decoding."""

from __future__ import annotations

import numpy as np
from neuronpipe.native import ROW_TYPES, ffi, lib
from neuronpipe.plans.convert.quantize import pack_codes
from neuronpipe.plans.package.layout import (
    BITS,
    BLOCK_QUANTIZATIONS,
    BLOCK_WEIGHTS,
    GROUP_WEIGHTS,
    Quantization,
    quant_bytes,
    scale_bytes,
)
from neuronpipe.plans.package.source_experts import GGUF_TYPES
from neuronpipe.plans.package.writer import Rows
from neuronpipe.plans.quantization_choice import LOSSLESS
from numpy.typing import NDArray

PLAIN_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
BYTES = "U8"  # bytes that are parts of weights, in tensors of checkpoints
BLOCK_WEIGHTS_BYTES = {  # weights and bytes of a block
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
    "MXFP4": (32, 17),
}
GROUPS_OF_BLOCK = BLOCK_WEIGHTS // GROUP_WEIGHTS
MAX_HALF = 65504
ENCODINGS = (*PLAIN_BYTES, *BLOCK_WEIGHTS_BYTES)


def row_bytes(encoding: str, columns: int) -> int | None:
    """Return the bytes of a row; None if it is not a whole number of the encoding's blocks."""
    if encoding == BYTES:
        return columns
    if encoding in PLAIN_BYTES:
        return columns * PLAIN_BYTES[encoding]
    block_weights, block_bytes = BLOCK_WEIGHTS_BYTES[encoding]
    return None if columns % block_weights else columns // block_weights * block_bytes


def decode_stored(encoding: str, stored: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the weights [rows, columns] of stored rows [rows, row bytes]."""
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


def can_unpack(encoding: str, quantization: Quantization) -> bool:
    """Return True if `unpack_gguf` converts this encoding to the quantization."""
    return encoding in GGUF_TYPES and bool(lib.np_gguf_fits(GGUF_TYPES[encoding], ROW_TYPES[quantization]))


def unpack_gguf(encoding: str, stored: NDArray[np.uint8], columns: int, quantization: Quantization) -> Rows | None:
    """Return stored rows [rows, row bytes] in a quantization, as the loader converts experts that are read in place;
    None if a value does not fit."""
    count = len(stored)
    rows = Rows(
        np.empty((count, quant_bytes(quantization, columns)), np.uint8),
        np.empty((count, scale_bytes(quantization, columns)), np.uint8),
    )
    source, quants, scales = (ffi.from_buffer("uint8_t[]", np.ascontiguousarray(array)) for array in (stored, *rows))
    type_ = ROW_TYPES[quantization]
    status = lib.np_unpack_gguf_rows(GGUF_TYPES[encoding], source, count, columns, type_, quants, scales)
    return rows if status == lib.NP_OK else None


def same_values(encoding: str, quantization: Quantization, stored: NDArray[np.uint8]) -> Rows | None:
    """Return stored rows [rows, row bytes] in a package's quantization, with the same values; None if that is not
    possible. Scales of IQ4_XS are rounded to fp16, as are those of MXFP4 below the range of fp16."""
    if encoding == "F16" and quantization == "f16":
        return Rows(stored, np.empty((len(stored), 0), dtype=np.uint8))
    if encoding in ("Q4_K", "Q5_K"):
        fits = quantization in BLOCK_QUANTIZATIONS and BITS[quantization] >= BITS[LOSSLESS[encoding]]
    else:
        fits = LOSSLESS.get(encoding) == quantization
    if not fits:
        return None
    if encoding in ("Q4_1", "Q5_0", "Q5_1"):
        return _with_halves(encoding, BITS[quantization], stored)
    block_weights, block_bytes = BLOCK_WEIGHTS_BYTES[encoding]
    return unpack_gguf(encoding, stored, stored.shape[1] // block_bytes * block_weights, quantization)


def _with_halves(encoding: str, bits: int, stored: NDArray[np.uint8]) -> Rows | None:
    """Return rows of Q4_1 as q4h, or of Q5_0 or Q5_1 as q5h; None if a minimum of Q5_0 exceeds the range of fp16.

    A block of 32 weights is: fp16 scale; for Q4_1 and Q5_1 the fp16 smallest weight; for Q5_0 and Q5_1 32 fifth bits;
    16 bytes of low four bits as in q4. Weights are scale * code + smallest weight; for Q5_0 scale * (code - 16).
    """
    blocks = stored.reshape(len(stored), -1, BLOCK_WEIGHTS_BYTES[encoding][1])
    scales, nibbles = blocks[..., :2].copy().view("<f2"), blocks[..., -16:]
    codes = np.concatenate((nibbles & 15, nibbles >> 4), axis=2)
    if bits > 4:
        codes = codes | np.unpackbits(blocks[..., -20:-16], axis=2, bitorder="little") << 4
    if encoding == "Q5_0":
        if not np.abs(scales.astype(np.float32)).max() <= MAX_HALF / 16:  # True for NaN, too
            return None
        minima = scales * np.float16(16)
    else:
        minima = -blocks[..., 2:4].copy().view("<f2")
    groups = -codes.shape[1] % GROUPS_OF_BLOCK
    padded = [np.pad(halves[..., 0], ((0, 0), (0, groups))) for halves in (scales, minima)]
    fields = np.stack([halves.reshape(len(stored), -1, GROUPS_OF_BLOCK) for halves in padded], axis=2)
    return Rows(pack_codes(codes, bits), fields.reshape(len(stored), -1).view(np.uint8))
