"""A pytest plugin for llama.cpp's server tests that accepts any text where they expect words of their own model.

Only regular expressions with such words are relaxed. The plugin is loaded with `-p` and runs in the Python environment
of those tests.
"""

from __future__ import annotations

import re
from typing import Any

import utils  # of llama.cpp: the module from which all its tests import everything

MODEL_WORDS = re.compile(
    r"going\|bed|princesses|But she couldn't|Suddenly|\^ blue|Aside\|she|Whillicter|\(very\|special|climb\|leaf"
    r"|John\)\+|\[ -3000 \]"
)
_match = utils.match_regex


def match_regex(regex: str, text: str) -> bool:
    """Match as llama.cpp's function does, and accept any text in place of its model's words."""
    return isinstance(text, str) if MODEL_WORDS.search(regex) else _match(regex, text)


def load_nothing(*_: Any) -> None:
    """Replace the download of models, which are not needed."""


utils.match_regex = match_regex
utils.ServerPreset.load_all = staticmethod(load_nothing)
