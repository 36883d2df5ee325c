"""Who computes for a participant what its engine leaves to others: products of layers, blocks, and rows of matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # who computes no blocks outside needs no numpy
    import numpy as np
    from neuronpipe.services.worker.participant import Participant
    from numpy.typing import NDArray


class Multiply(Protocol):
    """Computes the products of layers, as native/neuronpipe.h says: a step's begin between `begin` and `end`."""

    def begin(self, participant: Participant) -> None:
        """A step of this participant: its rows may be read from now on."""

    def __call__(self, participant: Participant, product: Any) -> None:
        """Compute the np_product that is wanted; or begin to, and when it is a turn's last have all of them computed.
        What is named in it is good until the turn's end; itself is not."""

    def end(self) -> None:
        """The step is over, or was left. Nothing of it is read any more."""


class ComputeBlocks(Protocol):
    """Who holds the weights of a participant's blocks."""

    def __call__(self, wanted: Any) -> NDArray[np.float32]:
        """The sums that np_wanted_blocks of native/neuronpipe.h wants: [pairs][nodes][width]. They are read before it
        is called again."""


ComputeRows = Callable[[Any], None]
"""Computes np_wanted_rows, as native/neuronpipe.h says."""
