"""The importance of the columns of matrices, by which encoding weighs the errors of weights.

The error of a weight changes a product by the error times the weight's input. The importance of a column is thus the
mean square of its input. It serves Down only where a package stores it by output: by neuron, all weights of a row have
the same input.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

MIN_RELATIVE_IMPORTANCE = 1e-3  # of the mean: an input that is 0 on the text may differ on others

ByColumn = NDArray[np.float32]


@frozen
class Importance:
    """The importance of the columns of a model's matrices.

    by_matrix: name of a Checkpoint's matrix -> importance [columns], about 1 on average. Errors of all columns count
        equally in other matrices.
    origin: name of the text or file that the importance is from
    """

    by_matrix: Mapping[str, ByColumn]
    origin: str

    @classmethod
    def of(cls, mean_squares: Mapping[str, ByColumn], origin: str) -> Importance:
        """Return the importance that follows from mean squares of inputs. Matrices whose inputs are all 0, like those
        of an expert that no token chose, have none.

        mean_squares: name of a matrix -> mean squares [columns], finite and not negative
        """
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
        """Return the SHA-256 of all values, by which interrupted work is recognized."""
        digest = hashlib.sha256()
        for name in sorted(self.by_matrix):
            digest.update(name.encode() + b"\0" + self.by_matrix[name].tobytes())
        return digest.hexdigest()
