"""How much the inputs of a model's matrices count: encoding weighs the error of each weight by it.

The error of a weight changes a product by that error times the input that the weight is multiplied with, so a column
counts by the mean square of its input. Down has no importance: its rows are stored by neuron, and all weights of a row
are multiplied with the same number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

MIN_RELATIVE_IMPORTANCE = 1e-3  # of a column, to the mean: an input that the text never used may still be used

ByColumn = NDArray[np.float32]


@frozen
class Importance:
    """The importance of the columns of a model's matrices.

    by_matrix: float32 [columns] by the names of a Checkpoint's matrices; the mean is about 1. A matrix without one is
        encoded with all columns equal.
    origin: the name of the text or file that it comes from
    """

    by_matrix: Mapping[str, ByColumn]
    origin: str

    @classmethod
    def of(cls, mean_squares: Mapping[str, ByColumn], origin: str) -> Importance:
        """Return the importance by the mean squares of the matrices' inputs [columns], finite and not negative. A
        matrix whose inputs are all zero, such as an expert's that no token chose, has none."""
        means = {name: values.mean(dtype=np.float64) for name, values in mean_squares.items()}
        return cls(
            {
                name: np.maximum(values / means[name], MIN_RELATIVE_IMPORTANCE).astype(np.float32)
                for name, values in mean_squares.items()
                if means[name] > 0
            },
            origin,
        )

    @property
    def digest(self) -> str:
        """SHA-256 of all values, by which interrupted work is recognized."""
        digest = hashlib.sha256()
        for name in sorted(self.by_matrix):
            digest.update(name.encode() + b"\0" + self.by_matrix[name].tobytes())
        return digest.hexdigest()
