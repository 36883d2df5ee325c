"""Random rows made as q4 codes at once: encoding half a million rows of floats takes minutes and changes nothing."""

from __future__ import annotations

import numpy as np
from neuronpipe.plans.package.layout import GROUP_WEIGHTS
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

# Sixteen equally likely weights, symmetric about zero and rounder than a uniform choice.
_WEIGHTS = np.array([-7, -6, -5, -4, -3, -3, -2, -1, 1, 2, 3, 3, 4, 5, 6, 7])
DEVIATION = float(np.sqrt(np.square(_WEIGHTS).mean()))
_NIBBLES = (_WEIGHTS + 8).astype(np.uint8)
_PAIRS = (_NIBBLES[np.arange(256) & 15] | _NIBBLES[np.arange(256) >> 4] << 4).astype(np.uint8)
ZEROS, ONES = np.uint8(0x88), np.uint8(0x99)
HALF_GROUP = GROUP_WEIGHTS // 2


def random_codes(rows: int, columns: int, random: np.random.Generator) -> Bytes:
    """Quants of random rows, uint8 [rows, columns / 2]; weights are codes of deviation DEVIATION."""
    drawn = np.frombuffer(random.bytes(rows * columns // 2), dtype=np.uint8)
    return np.asarray(_PAIRS[drawn].reshape(rows, -1))


def code_bytes(columns: slice) -> slice:
    """Where whole groups of columns lie in a row's quants."""
    return slice(columns.start // 2, columns.stop // 2)


def code_groups(columns: slice) -> slice:
    """Which scales belong to whole groups of columns."""
    return slice(columns.start // GROUP_WEIGHTS, columns.stop // GROUP_WEIGHTS)


def mixed(own: Bytes, other: Bytes, share: float) -> Bytes:
    """Rows that have `share` of their columns, evenly spread, from `other`: the dot products of both with one vector
    then have this correlation."""
    place = (np.arange(own.shape[1]) * 0.6180339887) % 1.0
    return np.where(place < share, other, own)


def scale_bytes_of(scales: NDArray[np.floating]) -> Bytes:
    """float [rows, groups] as the bytes of fp16 scales, uint8 [rows, 2 groups]."""
    return np.ascontiguousarray(scales.astype("<f2")).view(np.uint8)
