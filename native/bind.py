"""Write the cffi glue between Python and the native library: bind.py OUTPUT.c"""

import re
import sys
from pathlib import Path

from cffi import FFI

HEADER = Path(__file__).parent / "neuronpipe.h"
declarations = re.search(r"/\* cdef begin \*/(.*)/\* cdef end \*/", HEADER.read_text(), re.S)
if declarations is None:
    sys.exit(f"{HEADER}: the cdef markers are missing")
ffi = FFI()
ffi.cdef(declarations.group(1))
ffi.set_source("neuronpipe.native._kernels", '#include "neuronpipe.h"')
ffi.emit_c_code(sys.argv[1])
