"""The prompt of `run` and `ask`: a text, or standard input."""

from __future__ import annotations

import io
import shlex
import sys
from pathlib import Path

from neuronpipe.launch.formats import ONLY_UTF8
from neuronpipe.launch.generation.conversation import MAX_PROMPT_CHARACTERS
from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.progress import note_output
from neuronpipe.plans.pull.package_library import packages_folder
from neuronpipe.protocol.errors import UserError


def checked_prompt(prompt: str | None, package: Path | None) -> str:
    """Return the prompt; None reads standard input.

    package: named in the advice of an error to use `chat`

    Raises UserError for an empty or too long prompt, and if standard input is a terminal or not UTF-8.
    """
    if prompt is None:
        prompt = _read_standard_input(package)
    if not prompt:
        raise UserError("the prompt is empty: give -p TEXT, or pipe a text into standard input")
    if len(prompt) > MAX_PROMPT_CHARACTERS:
        raise UserError(f"the prompt has more than {MAX_PROMPT_CHARACTERS:,} characters: give a shorter one")
    return prompt


def _read_standard_input(package: Path | None) -> str:
    if sys.stdin.isatty():
        word = ""
        if package is not None and package != DEMO:
            word = " " + shlex.quote(package.name if package.parent == packages_folder() else str(package))
        raise UserError(
            "no prompt: give TEXT or -p TEXT, or pipe a text into standard input; "
            f"`neuronpipe chat{word}` holds a conversation"
        )
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    try:
        prompt = sys.stdin.read(MAX_PROMPT_CHARACTERS + 1)
    except UnicodeDecodeError:
        raise UserError(f"standard input: {ONLY_UTF8}") from None
    note_output()
    return prompt
