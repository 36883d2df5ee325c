"""Converts model files of other programs to packages."""

from neuronpipe.plans.convert.block_conversion import Progress
from neuronpipe.plans.convert.conversion import Encoded, convert

__all__ = ["Encoded", "Progress", "convert"]
