"""`python -m neuronpipe`, or `neuronpipe.launch`, is the `neuronpipe` command. native/CMakeLists.txt puts this file one
folder up as well."""

import sys

from neuronpipe.launch.cli import main

sys.exit(main())
