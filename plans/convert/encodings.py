"""Encodings of rows of weights in source files, named as in safetensors and GGUF, and their decoding."""

from __future__ import annotations

import numpy as np
from neuronpipe.native import ROW_TYPES, ffi, lib
from neuronpipe.plans.convert.quantize import pack_codes, pack_fields
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
MIN_HALF_EXPONENT, MAX_HALF_EXPONENT = -24, 15  # of the powers of two that fp16 can express
ENCODINGS = (*PLAIN_BYTES, *BLOCK_WEIGHTS_BYTES)


def row_bytes(encoding: str, columns: int) -> int | None:
    """Return the bytes of a row; None if it is not a whole number of the encoding's blocks."""
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
    possible. Scales of IQ4_XS are rounded to fp16."""
    if encoding == "F16" and quantization == "f16":
        return Rows(stored, np.empty((len(stored), 0), dtype=np.uint8))
    if encoding in ("Q4_K", "Q5_K"):
        fits = quantization in BLOCK_QUANTIZATIONS and BITS[quantization] >= BITS[LOSSLESS[encoding]]
        return _with_minima(encoding, BITS[quantization], stored) if fits else None
    if LOSSLESS.get(encoding) != quantization:
        return None
    if encoding == "IQ4_XS":
        return _of_iq4_xs(stored)
    if encoding == "MXFP4":
        return _of_mxfp4(stored)
    if encoding in ("Q4_1", "Q5_0", "Q5_1"):
        return _with_halves(encoding, BITS[quantization], stored)
    blocks = stored.reshape(len(stored), -1, BLOCK_WEIGHTS_BYTES[encoding][1])
    return Rows(blocks[..., 2:].reshape(len(stored), -1), blocks[..., :2].reshape(len(stored), -1))


def _of_iq4_xs(stored: NDArray[np.uint8]) -> Rows | None:
    """Return rows of IQ4_XS as iq4, with scales rounded to fp16; None if a scale exceeds the range of fp16.

    A block of 256 weights is: an fp16 unit; uint16 with the upper two bits of eight scales, from the lowest bits on;
    four bytes with their low four bits, from the low nibble on; 128 bytes of codes as in q4. A scale is unit * (its six
    bits - 32).
    """
    blocks = stored.reshape(len(stored), -1, BLOCK_WEIGHTS_BYTES["IQ4_XS"][1])
    unit = blocks[..., :2].copy().view("<f2").astype(np.float32)
    highs = blocks[..., 2:4].copy().view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    lows = np.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), axis=3).reshape(highs.shape)
    scales = unit * ((lows | highs << 4).astype(np.float32) - 32)
    if not np.abs(scales).max() <= MAX_HALF:  # True for NaN, too
        return None
    halves = scales.astype("<f2").reshape(len(stored), -1)
    return Rows(blocks[..., 8:].reshape(len(stored), -1), halves.view(np.uint8))


def _of_mxfp4(stored: NDArray[np.uint8]) -> Rows | None:
    """Return rows of MXFP4 as mxfp4; None if fp16 cannot express a scale.

    A block of 32 weights is: a byte with the exponent of the scale, 127 for 1; 16 bytes of codes as in q4.
    """
    blocks = stored.reshape(len(stored), -1, BLOCK_WEIGHTS_BYTES["MXFP4"][1])
    exponents = blocks[..., 0].astype(np.int32) - 128  # not 127: mxfp4's values are twice those of MXFP4
    if exponents.min() < MIN_HALF_EXPONENT or exponents.max() > MAX_HALF_EXPONENT:
        return None
    halves = np.ldexp(np.float32(1), exponents).astype("<f2")
    return Rows(blocks[..., 1:].reshape(len(stored), -1), halves.view(np.uint8))


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


def _with_minima(encoding: str, bits: int, stored: NDArray[np.uint8]) -> Rows:
    """Return rows of Q4_K or Q5_K as a quantization whose codes have at least as many `bits`: q4k, q5k or q6k.

    A block of 256 weights is: fp16 units of the scales and of the minima; 12 bytes with eight six-bit scales and
    minima; for Q5_K 32 bytes, bit g of byte j being the fifth bit of code j of group g; 128 bytes of low four bits:
    byte 32 i + j has code j of the groups 2 i (low nibble) and 2 i + 1.
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
