"""The parts of a cluster, and the priority of a warm-up, as native/neuronpipe.h and the wire number them."""

from typing import Final

GATE: Final = 0
REST: Final = 1
WARM_UP: Final = 2
