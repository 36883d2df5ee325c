"""The command as it was typed: a line that a person is to paste has to begin with it."""

from __future__ import annotations

import os
import shlex


def typed_command() -> str:
    """`neuronpipe`, or the path of the script of a checkout."""
    return shlex.quote(os.environ.get("NEURONPIPE_COMMAND") or "neuronpipe")
