"""From the model files people have to a package."""

from neuronpipe.plans.convert.block_conversion import Progress
from neuronpipe.plans.convert.conversion import Encoded, convert

__all__ = ["Encoded", "Progress", "convert"]
