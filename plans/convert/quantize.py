"""Encodes rows of weights in a package's quantizations, and decodes them. FORMAT.md specifies the bytes.

A group is 32 consecutive weights of a row. Scales are chosen as follows:

q8          largest magnitude / 127
q4          m / -8, where m is the weight of largest magnitude with its sign, so that m is exact up to the scale's
            rounding. As in q8, weights are divided by the rounded scale.
q3          the scale of several candidates with the smallest error, since with only eight values the largest magnitude
            gives a poor scale. For gates only.
iq4, mxfp4, and those with a minimum (q4k, q5k, q6k, q4h, q5h)  by np_encode_row of the native library
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from neuronpipe.native import ROW_TYPES, ffi, lib
from neuronpipe.plans.package.layout import BITS, GROUP_WEIGHTS, Quantization, quant_bytes, scale_bytes
from neuronpipe.plans.package.writer import Rows
from numpy.typing import NDArray

Weights = NDArray[np.float32]
Q3_PEAKS = (-5.0, -4.6, -4.2, -3.8, -3.4)  # candidates for the largest magnitude / scale; below -4 it is clipped
TINY = 1e-30  # groups without larger magnitudes are encoded as zeros


def encode(quantization: Quantization, weights: Weights, importance: Weights | None = None) -> Rows:
    """Return encoded rows. Raises OverflowError if a value or a scale is not finite or does not fit fp16.

    weights: [rows, n]
    importance: weights [n] of the squared errors of each column; None: all equal. Not used by q3, q4, q8 and f16.
    """
    if quantization in _ENCODERS:
        return _ENCODERS[quantization](weights)
    return _encode_natively(quantization, weights, importance)


def decode(quantization: Quantization, rows: Rows) -> Weights:
    """Return the weights [rows, n] of encoded rows."""
    if quantization in _DECODERS:
        return _DECODERS[quantization](rows)
    return _decode_natively(quantization, rows)


def _half(values: Weights) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        half = values.astype("<f2")
    if not np.isfinite(half).all():
        raise OverflowError("a value is not finite or does not fit fp16")
    return half


def _bytes_of(rows: int, array: NDArray[np.generic]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(rows, -1).view(np.uint8)


def _scaled(groups: Weights, peaks: Weights, divisor: int) -> tuple[NDArray[np.float16], Weights]:
    """Return fp16 scales peaks / divisor, and the weights divided by the scales and rounded to integers; 0 if the scale
    is 0."""
    scales = _half(peaks / np.float32(divisor))
    stored = scales.astype(np.float32)
    inverse = np.divide(1, stored, out=np.zeros_like(stored), where=stored != 0)
    return scales, np.rint(groups * inverse)


def _encode_q4(weights: Weights) -> Rows:
    groups = weights.reshape(len(weights), -1, GROUP_WEIGHTS)
    places = np.abs(groups).argmax(axis=2, keepdims=True)
    scales, quotients = _scaled(groups, np.take_along_axis(groups, places, axis=2), -8)
    codes = np.clip(quotients + 8, 0, 15).astype(np.uint8)
    half = GROUP_WEIGHTS // 2
    return Rows(_bytes_of(len(weights), codes[..., :half] | codes[..., half:] << 4), _bytes_of(len(weights), scales))


def _encode_q3(weights: Weights) -> Rows:
    groups = weights.reshape(len(weights), -1, GROUP_WEIGHTS)
    places = np.abs(groups).argmax(axis=2, keepdims=True)
    peaks = np.take_along_axis(groups, places, axis=2)
    _half(peaks / np.float32(-4))  # raises OverflowError before the search
    # A scale s = (q.w) / (q.q) fits quants q best, and leaves the error w.w - (q.w)^2 / (q.q).
    best = np.zeros((2, *peaks.shape), dtype=np.float32)
    for peak in Q3_PEAKS:
        inverse = np.divide(np.float32(peak), peaks, out=np.zeros_like(peaks), where=np.abs(peaks) > TINY)
        quants = np.clip(np.rint(groups * inverse), -4, 3)
        along = np.einsum("rgw,rgw->rg", quants, groups)[..., None]
        power = np.einsum("rgw,rgw->rg", quants, quants)[..., None]
        scale = np.divide(along, power, out=np.zeros_like(along), where=power > 0)
        best = np.where(along * scale > best[0], np.stack((along * scale, scale)), best)
    scales, quotients = _scaled(groups, best[1], 1)
    codes = np.clip(quotients + 8, 4, 11).astype(np.uint8)
    half = GROUP_WEIGHTS // 2
    quants4 = _bytes_of(len(weights), codes[..., :half] | codes[..., half:] << 4)
    return Rows(q3_of_q4(quants4), _bytes_of(len(weights), scales))


def q3_of_q4(quants: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return quants of q3 [rows, 3 n / 8] for quants of q4 [rows, n / 2] whose weights are -4 to 3 times the scale."""
    codes = quants.reshape(len(quants), -1, GROUP_WEIGHTS // 2) - np.uint8(0x44)  # q3 adds 4 to weights, q4 adds 8
    lows, thirds = codes & 0x33, codes & 0x44
    packed = np.empty((*codes.shape[:2], 12), dtype=np.uint8)
    packed[..., :8] = lows[..., :8] | lows[..., 8:] << 2
    packed[..., 8:] = thirds[..., :4] >> 2 | thirds[..., 4:8] >> 1 | thirds[..., 8:12] | thirds[..., 12:] << 1
    return packed.reshape(len(quants), -1)


def q4_of_q3(quants: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return quants of q4 with the weights of quants of q3; the inverse of `q3_of_q4`."""
    packed = quants.reshape(len(quants), -1, 12)
    lows, thirds = packed[..., :8], packed[..., 8:]
    codes = np.concatenate((lows & 0x33, lows >> 2 & 0x33), axis=2)
    codes |= np.concatenate((thirds << 2, thirds << 1, thirds, thirds >> 1), axis=2) & 0x44
    return (codes + np.uint8(0x44)).reshape(len(quants), -1)


def _encode_q8(weights: Weights) -> Rows:
    groups = weights.reshape(len(weights), -1, GROUP_WEIGHTS)
    scales, quotients = _scaled(groups, np.abs(groups).max(axis=2, keepdims=True), 127)
    codes = np.clip(quotients, -127, 127).astype(np.int8)
    return Rows(_bytes_of(len(weights), codes), _bytes_of(len(weights), scales))


def _encode_f16(weights: Weights) -> Rows:
    return Rows(_bytes_of(len(weights), _half(weights)), np.empty((len(weights), 0), dtype=np.uint8))


def _decode_q4(rows: Rows) -> Weights:
    packed = rows.quants.reshape(len(rows.quants), -1, GROUP_WEIGHTS // 2)
    codes = np.concatenate((packed & 15, packed >> 4), axis=2).astype(np.float32) - 8
    return _times_scales(codes, rows.scales)


def _decode_q3(rows: Rows) -> Weights:
    return _decode_q4(Rows(q4_of_q3(rows.quants), rows.scales))


def _decode_q8(rows: Rows) -> Weights:
    codes = rows.quants.view(np.int8).reshape(len(rows.quants), -1, GROUP_WEIGHTS)
    return _times_scales(codes.astype(np.float32), rows.scales)


def _times_scales(codes: Weights, scales: NDArray[np.uint8]) -> Weights:
    stored = np.ascontiguousarray(scales).view("<f2").astype(np.float32)
    product: Weights = codes * stored[..., None]
    return product.reshape(len(codes), -1)


def _encode_natively(quantization: Quantization, weights: Weights, importance: Weights | None) -> Rows:
    weights = np.ascontiguousarray(weights, dtype=np.float32)
    count, n = weights.shape
    rows = Rows(
        np.empty((count, quant_bytes(quantization, n)), np.uint8),
        np.empty((count, scale_bytes(quantization, n)), np.uint8),
    )
    source, quants, scales = (ffi.from_buffer("uint8_t[]", array) for array in (weights, *rows))
    columns = None if importance is None else np.ascontiguousarray(importance, dtype=np.float32)
    by_column = ffi.NULL if columns is None else ffi.from_buffer("float[]", columns)
    for row in range(count):
        status = lib.np_encode_row(
            ROW_TYPES[quantization],
            ffi.cast("float *", source + row * 4 * n),
            by_column,
            n,
            quants + row * rows.quants.shape[1],
            scales + row * rows.scales.shape[1],
        )
        if status < 0:
            raise OverflowError("a value is not finite or does not fit fp16")
    return rows


def _decode_natively(quantization: Quantization, rows: Rows) -> Weights:
    quants, scales = np.ascontiguousarray(rows.quants), np.ascontiguousarray(rows.scales)
    n = quants.shape[1] * 8 // BITS[quantization]
    weights = np.empty((len(quants), n), np.float32)
    target = ffi.from_buffer("float[]", weights, require_writable=True)
    quants_at, scales_at = ffi.from_buffer("uint8_t[]", quants), ffi.from_buffer("uint8_t[]", scales)
    for row in range(len(weights)):
        lib.np_decode_row(
            ROW_TYPES[quantization],
            quants_at + row * quants.shape[1],
            scales_at + row * scales.shape[1],
            n,
            target + row * n,
        )
    return weights


def pack_codes(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Return quants of 4, 5 or 6 `bits` for codes [rows, groups, 32]: low four bits as in q4, then for each higher bit
    a plane for the first 16 codes of every group, and one for the last 16."""
    half = GROUP_WEIGHTS // 2
    planes = [_bytes_of(len(codes), codes[..., :half] & 15 | codes[..., half:] << 4)]
    for bit in range(4, bits):
        plane = np.packbits(codes >> bit & 1, axis=2, bitorder="little")
        planes += [_bytes_of(len(codes), plane[..., :2]), _bytes_of(len(codes), plane[..., 2:])]
    return np.concatenate(planes, axis=1)


def _decode_f16(rows: Rows) -> Weights:
    return np.ascontiguousarray(rows.quants).view("<f2").astype(np.float32)


_ENCODERS: dict[Quantization, Callable[[Weights], Rows]] = {
    "q3": _encode_q3,
    "q4": _encode_q4,
    "q8": _encode_q8,
    "f16": _encode_f16,
}
_DECODERS: dict[Quantization, Callable[[Rows], Weights]] = {
    "q3": _decode_q3,
    "q4": _decode_q4,
    "q8": _decode_q8,
    "f16": _decode_f16,
}
