"""`python -m neuronpipe.launch` is the `neuronpipe` command."""

import sys

from neuronpipe.launch.cli import main

sys.exit(main())
