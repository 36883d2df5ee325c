"""The native library as Python sees it: `lib` has the functions of neuronpipe.h, `ffi` makes and reads their
arguments."""

from neuronpipe.native._kernels import ffi, lib

__all__ = ["ffi", "lib"]
