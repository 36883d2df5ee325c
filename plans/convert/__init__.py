"""From the model files people have to a package."""

from neuronpipe.plans.convert.conversion import Progress, convert

__all__ = ["Progress", "convert"]
