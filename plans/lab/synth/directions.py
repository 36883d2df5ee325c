"""A layer's predictor without a decomposition of its neurons: their rows are random, so the directions in which most of
their input moves are the ones that low rank serves best.

The state's coordinates are independent by construction, each its own direction. What the layers write moves together in
fewer directions than coordinates: the leading ones of its covariance.
"""

from __future__ import annotations

import numpy as np
from neuronpipe.plans.convert.quantize import decode, encode
from neuronpipe.plans.lab.synth import codes
from neuronpipe.plans.lab.synth.shapes import Coordinates
from neuronpipe.plans.package.layout import GROUP_WEIGHTS, Quantization
from neuronpipe.plans.package.writer import Rows
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

Array = NDArray[np.float32]


@frozen
class Directions:
    """Directions of a layer's input: orthonormal ones of the written coordinates [written, count], then the leading
    coordinates of the state."""

    of_written: Array
    written: slice
    of_state: slice

    @classmethod
    def leading(cls, normed: Array, places: Coordinates, rank: int) -> Directions:
        """Return the `rank` directions, in whole groups of either kind, with the largest variance of normed [tokens,
        width]."""
        written = slice(places.attention.start, places.feed_forward.stop)
        power, turn = np.linalg.eigh(np.cov(normed[:, written].T))
        power, turn = power[::-1], turn[:, ::-1].astype(np.float32)
        of_state = normed[:, places.state].var(axis=0)
        fewest = max(GROUP_WEIGHTS, rank - len(of_state) // GROUP_WEIGHTS * GROUP_WEIGHTS)
        counts = range(fewest, min(rank, len(power) + 1), GROUP_WEIGHTS)
        count = max(counts, key=lambda count: power[:count].sum() + of_state[: rank - count].sum())
        first = slice(places.state.start, places.state.start + rank - count)
        return cls(np.ascontiguousarray(turn[:, :count]), written, first)

    def rows(self, width: int) -> Array:
        """Return the rows that the predictor multiplies its input with, float32 [rank, width]."""
        count, states = self.of_written.shape[1], self.of_state.stop - self.of_state.start
        rows = np.zeros((count + states, width), dtype=np.float32)
        rows[:count, self.written] = self.of_written.T
        rows[count + np.arange(states), self.of_state.start + np.arange(states)] = 1
        return rows

    def factor(self, gate: Rows, quantization: Quantization) -> Rows:
        """Return the products of neurons' gate rows with the directions, encoded [neurons, rank]."""
        of_written, of_state = (_weights(gate, columns) for columns in (self.written, self.of_state))
        return encode(quantization, np.concatenate((of_written @ self.of_written, of_state), axis=1))


def _weights(rows: Rows, columns: slice) -> Array:
    scales = rows.scales.view("<f2")[:, codes.code_groups(columns)]
    return decode("q4", Rows(rows.quants[:, codes.code_bytes(columns)], scales.view(np.uint8)))
