"""The parts of a cluster and the priorities of reads, as native/neuronpipe.h and the wire number them."""

from typing import Final

GATE: Final = 0
REST: Final = 1

DEMAND: Final = 0
PREFETCH: Final = 1
WARM_UP: Final = 2
