"""From the model files people have to a package."""

from neuronpipe.plans.convert.conversion import Encoded, convert
from neuronpipe.plans.convert.work import Progress

__all__ = ["Encoded", "Progress", "convert"]
