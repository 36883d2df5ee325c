"""Random rows as q4 codes. Encoding float rows would take minutes for a 7B, with no benefit, since thresholds are set
on the quantized rows."""

from __future__ import annotations

import numpy as np
from neuronpipe.plans.package.layout import GROUP_WEIGHTS
from neuronpipe.plans.package.writer import Rows
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

# Sixteen equally likely weights, symmetric about 0, closer to a normal distribution than a uniform choice.
_WEIGHTS = np.array([-7, -6, -5, -4, -3, -3, -2, -1, 1, 2, 3, 3, 4, 5, 6, 7])
DEVIATION = float(np.sqrt(np.square(_WEIGHTS).mean()))
_NIBBLES = (_WEIGHTS + 8).astype(np.uint16)
_NUMBERS = np.arange(1 << 16)
_FOURS = sum(_NIBBLES[_NUMBERS >> shift & 15] << shift for shift in (0, 4, 8, 12)).astype(np.uint16)
# For each nibble, half the weight, -3 to 3, which a gate in q3 can express.
_COARSE = np.array([0, -3, -3, -3, -2, -2, -1, -1, 0, 1, 1, 2, 2, 3, 3, 3]) + 8
_COARSE_PAIRS = (_COARSE[:, None] << 4 | _COARSE).reshape(-1).astype(np.uint8)
COARSE_DEVIATION = float(np.sqrt(np.square(_COARSE[_WEIGHTS + 8] - 8).mean()))
ZERO_PAIRS, ONE_PAIRS = np.uint8(0x88), np.uint8(0x99)
LARGEST = 7  # magnitude of the weights that express signs
_SIGN_PAIRS = np.array([0x11, 0x1F, 0xF1, 0xFF], dtype=np.uint8)
HALF_GROUP = GROUP_WEIGHTS // 2


def generator(*place: int) -> np.random.Generator:
    """Return the generator for a place in a package (seed, part, number), independent of threads and order."""
    return np.random.Generator(np.random.SFC64(place))


def random_codes(rows: int, columns: int, random: np.random.Generator) -> Bytes:
    """Return quants of random rows, [rows, columns / 2]. Their codes have deviation DEVIATION."""
    words = random.integers(0, 1 << 64, rows * columns // 16, dtype=np.uint64)
    return np.asarray(_FOURS[words.view(np.uint16)].view(np.uint8).reshape(rows, -1))


def random_signs(rows: int, columns: int, random: np.random.Generator) -> Bytes:
    """Return quants of rows whose codes are LARGEST or -LARGEST at random, [rows, columns / 2]."""
    return np.asarray(_SIGN_PAIRS[random.integers(0, 4, (rows, columns // 2), dtype=np.uint8)])


def unit_scale(vectors: NDArray[np.float32]) -> float:
    """Return the scale with which products of random rows with `vectors` [tokens, n] have a deviation of about 1."""
    return 1 / (DEVIATION * float(np.sqrt(np.square(vectors).sum(axis=1).mean())))


def coarse(quants: Bytes) -> Bytes:
    """Return quants with half the codes, -3 to 3, of deviation COARSE_DEVIATION."""
    return np.asarray(_COARSE_PAIRS[quants])


def zero_rows(rows: int, columns: int) -> Rows:
    quants = np.full((rows, columns // 2), ZERO_PAIRS)
    return Rows(quants, np.zeros((rows, 2 * (columns // GROUP_WEIGHTS)), dtype=np.uint8))


def reading_rows(
    vectors: NDArray[np.float32], columns: slice, deviations: NDArray[np.float64], random: np.random.Generator
) -> Rows:
    """Return random rows that read only some columns, in whole groups.

    vectors: [tokens, n]
    deviations: those of the rows' products with `vectors`, about [rows]
    """
    rows = zero_rows(len(deviations), vectors.shape[1])
    rows.quants[:, code_bytes(columns)] = random_codes(len(deviations), columns.stop - columns.start, random)
    scales = unit_scale(vectors[:, columns]) * deviations[:, None]
    rows.scales.view("<f2")[:, code_groups(columns)] = scales
    return rows


def equal_scales(quants: Bytes) -> Bytes:
    """Return scales of 1 for rows, so that their weights are their codes."""
    return np.ones((len(quants), quants.shape[1] // HALF_GROUP), dtype="<f2").view(np.uint8)


def code_bytes(columns: slice) -> slice:
    """Return the range of a row's quants, in bytes, for a range of columns."""
    return slice(columns.start // 2, columns.stop // 2)


def code_groups(columns: slice) -> slice:
    """Return the range of a row's scales for a range of columns, in whole groups."""
    return slice(columns.start // GROUP_WEIGHTS, columns.stop // GROUP_WEIGHTS)


def mixed(rows: Bytes, mixed_in: Bytes, share: float) -> Bytes:
    """Return `rows` with a share of their columns, evenly spread, from `mixed_in`. Products with a vector then have the
    correlation `share` with those of `mixed_in`."""
    position = (np.arange(rows.shape[1]) * 0.6180339887) % 1.0
    result = rows ^ mixed_in
    result &= np.where(position < share, np.uint8(0xFF), np.uint8(0))
    result ^= rows
    return result
