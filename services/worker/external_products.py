"""Interfaces for computing matrix products of layers, offloaded blocks and offloaded matrices in place of a
participant's engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # a worker without offloaded blocks needs no numpy
    import numpy as np
    from neuronpipe.services.worker.participant import Participant
    from numpy.typing import NDArray


class Multiply(Protocol):
    """External matrix products of layers, as native/neuronpipe.h describes them."""

    def begin(self, participant: Participant) -> None:
        """Begin a step of this participant. Its rows may be read from now on."""

    def __call__(self, participant: Participant, product: Any) -> None:
        """Compute an np_product, or start it and complete all started ones at the last product of a turn.

        The buffers that the product names stay valid until the end of the turn; the structure itself does not.
        """

    def end(self) -> None:
        """End the step, completed or abandoned. Nothing of it is read any more."""


class ComputeBlocks(Protocol):
    """The computation of a participant's offloaded blocks."""

    def __call__(self, request: Any, /) -> NDArray[np.float32]:
        """Return the sums that an np_offloaded_blocks of native/neuronpipe.h requests: [pairs][nodes][width]. The
        caller reads them before the next call."""


ComputeRows = Callable[[Any], None]
"""The computation of the rows that an np_offloaded_matrix of native/neuronpipe.h requests."""
