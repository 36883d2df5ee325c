"""Kinds of spans that are shown alike: in pictures, in a terminal, in a page.

Colours are from Okabe and Ito's palette, which people with any common kind of colour vision can tell apart; waiting is
pale, so that what is dark is work.
"""

from __future__ import annotations

from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.spans import KINDS

NUMBER = {kind.name: kind.number for kind in KINDS}


@frozen
class Group:
    """Kinds that are shown alike. letter: in the cells of a strip; empty for what spans a whole step."""

    letter: str
    label: str
    kinds: tuple[str, ...]
    colour: str
    works: bool = True

    @property
    def dark(self) -> bool:
        """Whether white letters on it are easier to read than black ones: by its lightness as sRGB weighs it."""
        red, green, blue = (int(self.colour[n : n + 2], 16) for n in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue < 120


GROUPS = (
    Group("a", "attention", ("qkv", "attend", "project"), "#0072b2"),
    Group("p", "predictor", ("predict",), "#cc79a7"),
    Group("n", "neurons", ("neurons",), "#009e73"),
    Group("s", "sums and logits", ("combine", "logits"), "#56b4e9"),
    Group("f", "waiting for flash", ("flash",), "#d55e00", works=False),
    Group("m", "waiting for participants", ("barrier",), "#cfcfcf", works=False),
    Group("r", "reading flash", ("read",), "#e69f00"),
    Group("e", "evicting", ("evict",), "#5c4a00"),
    Group("c", "messages, sampling, text", ("send", "sample", "tell"), "#444444"),
    Group("", "step under way", ("step", "await"), "#eef1f5", works=False),
)
GROUP_OF = {NUMBER[kind]: group for group in GROUPS for kind in group.kinds}
"""The group of each kind's number."""
