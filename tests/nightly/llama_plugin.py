"""For pytest with llama.cpp's server tests: what their model says of its text is not asked of ours.

Only regular expressions that name their model's words are relaxed, to any text at all. Loaded with `-p`; runs with the
Python of those tests.
"""

from __future__ import annotations

import re
from typing import Any

import utils  # theirs: the module that all their tests take everything from

THEIR_WORDS = re.compile(
    r"going\|bed|princesses|But she couldn't|Suddenly|\^ blue|Aside\|she|Whillicter|\(very\|special|climb\|leaf"
    r"|John\)\+|\[ -3000 \]"
)
_match = utils.match_regex


def match_regex(regex: str, text: str) -> bool:
    """As theirs, and any text in place of their model's words."""
    return isinstance(text, str) if THEIR_WORDS.search(regex) else _match(regex, text)


def nothing(*_: Any) -> None:
    """There are no models to download."""


utils.match_regex = match_regex
utils.ServerPreset.load_all = staticmethod(nothing)
