"""The native library: `lib` has the functions of neuronpipe.h, `ffi` creates and reads their arguments."""

from neuronpipe.native._kernels import ffi, lib

__all__ = ["ffi", "lib"]
