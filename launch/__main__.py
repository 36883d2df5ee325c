"""Run the `neuronpipe` command as `python -m neuronpipe` or `python -m neuronpipe.launch`.

native/CMakeLists.txt puts this file one folder up as well.
"""

import sys

from neuronpipe.launch.cli import main

sys.exit(main())
