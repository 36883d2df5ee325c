"""Encoding rows of weights as q4, q8 or f16, and back. Groups are 32 consecutive weights of a row with one fp16 scale.

q8: int8, scale = absmax/127. q4: two weights per byte, byte j of a group holds weight j (low nibble) and weight j+16
(high nibble); w = scale*(nibble-8) with scale = m/-8, where m is the weight of largest magnitude with its sign, so that
m itself is exact up to the scale's rounding. Both divide by the scale as it is stored, after rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from neuronpipe.plans.package.layout import GROUP_WEIGHTS, Quantization
from neuronpipe.plans.package.writer import Rows
from numpy.typing import NDArray

Weights = NDArray[np.float32]


def encode(quantization: Quantization, weights: Weights) -> Rows:
    """Encode float32 [rows, n]. Raises OverflowError when a value or a scale does not fit fp16, NaN included."""
    return _ENCODERS[quantization](weights)


def decode(quantization: Quantization, rows: Rows) -> Weights:
    """The weights that encoded rows stand for: float32 [rows, n]."""
    return _DECODERS[quantization](rows)


def _half(values: Weights) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        half = values.astype("<f2")
    if not np.isfinite(half).all():
        raise OverflowError("a value is not finite or does not fit fp16")
    return half


def _bytes_of(rows: int, array: NDArray[np.generic]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(rows, -1).view(np.uint8)


def _scaled(groups: Weights, peaks: Weights, divisor: int) -> tuple[NDArray[np.float16], Weights]:
    """fp16 scales peaks/divisor, and the groups divided by them (0 where the scale is 0)."""
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


def _decode_q8(rows: Rows) -> Weights:
    codes = rows.quants.view(np.int8).reshape(len(rows.quants), -1, GROUP_WEIGHTS)
    return _times_scales(codes.astype(np.float32), rows.scales)


def _times_scales(codes: Weights, scales: NDArray[np.uint8]) -> Weights:
    stored = np.ascontiguousarray(scales).view("<f2").astype(np.float32)
    product: Weights = codes * stored[..., None]
    return product.reshape(len(codes), -1)


def _decode_f16(rows: Rows) -> Weights:
    return np.ascontiguousarray(rows.quants).view("<f2").astype(np.float32)


_ENCODERS: dict[Quantization, Callable[[Weights], Rows]] = {"q4": _encode_q4, "q8": _encode_q8, "f16": _encode_f16}
_DECODERS: dict[Quantization, Callable[[Rows], Weights]] = {"q4": _decode_q4, "q8": _decode_q8, "f16": _decode_f16}
