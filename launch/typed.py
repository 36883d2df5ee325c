"""The command as it was typed: a line that a person is to paste has to begin with it."""

from __future__ import annotations

import os
import shlex


def as_typed(text: str) -> str:
    """A text for a person, whose commands in backticks begin as this one was typed. Whoever writes such a text, further
    down, knows `neuronpipe` only."""
    return text.replace("`neuronpipe ", f"`{typed_command()} ")


def typed_command() -> str:
    """`neuronpipe`, or the path of the script of a checkout."""
    return shlex.quote(os.environ.get("NEURONPIPE_COMMAND") or "neuronpipe")
