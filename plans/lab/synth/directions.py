"""Directions for a layer's predictor: those in which its input varies most. Neurons need no decomposition, since their
rows are random.

The coordinates of the state are independent, so that each is a direction. The outputs of layers vary in fewer
directions than coordinates: the leading ones of their covariance.
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
    """Directions of a layer's input.

    of_written: orthonormal directions of the coordinates that layers write [written, count]
    written: these coordinates
    of_state: coordinates of the state, each of which is a direction
    """

    of_written: Array
    written: slice
    of_state: slice

    @classmethod
    def leading(cls, normed: Array, places: Coordinates, rank: int) -> Directions:
        """Return the `rank` directions with the largest variance of `normed` [tokens, width]. of_written has whole
        groups of them."""
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
        """Return the directions as the predictor's first factor [rank, width]."""
        count, states = self.of_written.shape[1], self.of_state.stop - self.of_state.start
        rows = np.zeros((count + states, width), dtype=np.float32)
        rows[:count, self.written] = self.of_written.T
        rows[count + np.arange(states), self.of_state.start + np.arange(states)] = 1
        return rows

    def factor(self, gate: Rows, quantization: Quantization) -> Rows:
        """Return the products of gate rows with the directions, encoded: the second factor [neurons, rank]."""
        of_written, of_state = (_weights(gate, columns) for columns in (self.written, self.of_state))
        return encode(quantization, np.concatenate((of_written @ self.of_written, of_state), axis=1))


def _weights(rows: Rows, columns: slice) -> Array:
    scales = rows.scales.view("<f2")[:, codes.code_groups(columns)]
    return decode("q4", Rows(rows.quants[:, codes.code_bytes(columns)], scales.view(np.uint8)))
