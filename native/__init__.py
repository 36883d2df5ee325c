"""The native library: `lib` has the functions of neuronpipe.h, `ffi` creates and reads their arguments.

ROW_TYPES: the number of each quantization of rows.
"""

from neuronpipe.native import _kernels
from neuronpipe.native._kernels import ffi, lib

__all__ = ["ROW_TYPES", "engine_id", "ffi", "lib"]

ROW_TYPES = {
    "f16": lib.NP_F16,
    "q8": lib.NP_Q8,
    "q4": lib.NP_Q4,
    "q3": lib.NP_Q3,
    "q4k": lib.NP_Q4K,
    "q5k": lib.NP_Q5K,
    "q6k": lib.NP_Q6K,
    "iq4": lib.NP_IQ4,
    "mxfp4": lib.NP_MXFP4,
    "q4h": lib.NP_Q4H,
    "q5h": lib.NP_Q5H,
}


def engine_id() -> str:
    """Return a hash of the compiled library, since another build may round differently."""
    import hashlib  # few processes need it

    with open(_kernels.__file__, "rb") as library:
        return hashlib.file_digest(library, "sha256").hexdigest()[:32]
