"""The parts of a cluster, as native/neuronpipe.h and the wire number them."""

from typing import Final

GATE: Final = 0
REST: Final = 1
