"""The parts of a cluster, as native/neuronpipe.h and the wire number them."""

from typing import Final

TRIGGER: Final = 0
VALUE: Final = 1
