"""Groups of span kinds that are displayed alike: in pictures, in a terminal and on the page.

Colours are from the palette of Okabe and Ito, which is safe for people with the common kinds of colour blindness.
Waiting is pale, so that dark areas are work.
"""

from __future__ import annotations

from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.memory.spans import KINDS

NUMBER = {kind.name: kind.number for kind in KINDS}


@frozen
class Group:
    """Kinds of spans that are displayed alike.

    letter: the letter in the cells of a strip; empty for spans of a whole step
    kinds: names of `KINDS`
    colour: #rrggbb
    works: False for waiting and for whole steps
    """

    letter: str
    label: str
    kinds: tuple[str, ...]
    colour: str
    works: bool = True

    @property
    def dark(self) -> bool:
        """True if white text on this colour is easier to read than black text, by the weights of sRGB."""
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
