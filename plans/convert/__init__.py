"""From the model files people have to a package."""

from neuronpipe.plans.convert.conversion import Encoded, Progress, convert

__all__ = ["Encoded", "Progress", "convert"]
