"""The tensors of a GGUF counterpart, and their random weights in the encodings of GGUF."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf.constants import GGUF_DEFAULT_ALIGNMENT
from neuronpipe.plans.convert.encodings import BLOCK_WEIGHTS_BYTES, PLAIN_BYTES
from numpy.typing import NDArray

Progress = Callable[[int, int], None]
OTHER_ENCODINGS = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}  # for rows that are no whole number of blocks
BLOCK_WEIGHTS = 32  # of these encodings, and of all the others
PIECE_BYTES = 8 << 20  # of random weights that are computed at once
# Of random blocks with a scale of 1: where the fp16 scale lies, and the deviation of the weights. A random nibble - 8
# deviates by 4.6, a signed byte by 74. In Q6_K signed bytes are factors of six bits - 32, which deviate by 18.5. In
# Q4_K six-bit factors, with a mean of 31.5, scale codes and minima.
SCALES = {
    "Q4_0": (0, 4.6),
    "Q5_0": (0, 9.2),
    "Q8_0": (0, 74.0),
    "Q6_K": (208, 74 * 18.5),
    "Q4_K": (0, 230.0),
}
MXFP4_DEVIATION = 2.93  # of a random nibble's value, times 2^(exponent - 127)
MEAN_CODES = {"Q4_K": 7.5}  # minima of this size, in units of scales, center the weights


class Tensor(NamedTuple):
    """A tensor of a GGUF counterpart.

    rows: number of rows; 0: a vector
    stacked: number of stacked matrices, one for each expert or head; 0: a plain matrix
    lengths: lengths of its rows; empty: all about 1
    constant: value of all elements; None: random, vectors are 1
    values: elements of a vector; empty: as `constant` says
    """

    name: str
    rows: int
    columns: int
    encoding: str
    stacked: int = 0
    lengths: tuple[float, ...] = ()
    constant: float | None = None
    values: tuple[float, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for size in (self.stacked, self.rows, self.columns) if size)

    @property
    def size_bytes(self) -> int:
        block_weights, block_bytes = _block(self.encoding)
        return math.prod(self.shape) // block_weights * block_bytes

    def in_whole_blocks(self) -> Tensor:
        """Return the tensor in its encoding, or in the one that llama.cpp takes if rows are no whole number of its
        blocks."""
        if self.columns % _block(self.encoding)[0] == 0:
            return self
        return self._replace(encoding=OTHER_ENCODINGS.get(self.encoding, self.encoding))


def write_weights(place: Path, tensors: tuple[Tensor, ...], seed: int, progress: Progress | None) -> None:
    """Append the weights of all tensors to a file that ends behind its description of them.

    progress: receives the bytes that are written, and all bytes
    """
    pieces = [
        (tensor, (seed, number, start), min(_piece_bytes(tensor), tensor.size_bytes - start))
        for number, tensor in enumerate(tensors)
        for start in range(0, tensor.size_bytes, _piece_bytes(tensor))
    ]
    written, total = 0, sum(tensor.size_bytes for tensor in tensors)
    with place.open("ab") as file, ThreadPoolExecutor(1) as pool:
        file.write(bytes(-file.tell() % GGUF_DEFAULT_ALIGNMENT))
        coming = pool.submit(_random, *pieces[0])
        for number, (tensor, place_of_piece, size_bytes) in enumerate(pieces):
            piece = coming.result()
            if number + 1 < len(pieces):
                coming = pool.submit(_random, *pieces[number + 1])
            file.write(piece.data)
            if place_of_piece[-1] + size_bytes == tensor.size_bytes:
                file.write(bytes(-tensor.size_bytes % GGUF_DEFAULT_ALIGNMENT))
            written += size_bytes
            if progress is not None:
                progress(written, total)


def _block(encoding: str) -> tuple[int, int]:
    return (1, PLAIN_BYTES[encoding]) if encoding in PLAIN_BYTES else BLOCK_WEIGHTS_BYTES[encoding]


def _piece_bytes(tensor: Tensor) -> int:
    return PIECE_BYTES // (block_bytes := _block(tensor.encoding)[1]) * block_bytes


def _random(tensor: Tensor, place: tuple[int, ...], size_bytes: int) -> NDArray[np.uint8] | NDArray[np.float32]:
    """Return a piece of a tensor. Norms are 1, rows have lengths near 1, so that activations stay finite.

    place: seed, number of the tensor, first byte within the tensor
    """
    generator, length = np.random.Generator(np.random.SFC64(place)), np.sqrt(tensor.columns)
    if tensor.encoding == "F32":
        count = size_bytes // PLAIN_BYTES["F32"]
        if tensor.values:
            return np.array(tensor.values, dtype=np.float32)
        if tensor.constant is not None or not tensor.rows:
            return np.full(count, 1 if tensor.constant is None else tensor.constant, dtype=np.float32)
        values = generator.standard_normal(count, dtype=np.float32) / np.float32(length)
        if tensor.lengths:
            first = place[-1] // PLAIN_BYTES["F32"]
            values *= np.array(tensor.lengths, np.float32)[np.arange(first, first + count) // tensor.columns]
        return np.asarray(values)
    block_bytes = BLOCK_WEIGHTS_BYTES[tensor.encoding][1]
    blocks = generator.integers(0, 1 << 64, -(-size_bytes // 8), dtype=np.uint64).view(np.uint8)[:size_bytes]
    blocks = blocks.reshape(-1, block_bytes)
    if tensor.encoding == "MXFP4":
        exponent = 127 - round(math.log2(MXFP4_DEVIATION * length))
        blocks[:, 0] = generator.integers(exponent - 1, exponent + 2, len(blocks), dtype=np.uint8)
        return blocks.reshape(-1)
    at, spread = SCALES[tensor.encoding]
    # The mean of quants may be below 0, so scales have both signs.
    sizes = generator.random(len(blocks), dtype=np.float32) + np.float32(0.5)
    np.negative(sizes, where=generator.integers(0, 2, len(blocks), dtype=np.bool_), out=sizes)
    sizes /= np.float32(spread * length)
    blocks[:, at : at + 2] = sizes.astype("<f2").view(np.uint8).reshape(-1, 2)
    if tensor.encoding in MEAN_CODES:
        minima = sizes * np.float32(MEAN_CODES[tensor.encoding])
        blocks[:, at + 2 : at + 4] = minima.astype("<f2").view(np.uint8).reshape(-1, 2)
    return blocks.reshape(-1)
