"""What the screen is drawn with: colours, bars of shares, trends, lists; all in a given number of columns."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from neuronpipe.services.monitor.span_groups import GROUPS
from rich.text import Text

FAINT, STRONG, BAD = "bright_black", "bold", "bold red"
NOTHING = "#303030"
COLOURS = {group.label: group.colour for group in GROUPS} | {
    "waiting for participants": "#606060",
    "evicting": "#b8a45c",
    "messages, sampling, text": "#a0a0a0",
}
"""As in pictures, but for a dark ground where those are for a light one."""
REGIONS = {"fixed": "#0072b2", "kv": "#56b4e9", "hot": "#009e73", "cold": "#e69f00"}
TICKS = " ▁▂▃▄▅▆▇█"


def bar(parts: Iterable[tuple[str, float]], columns: int) -> Text:
    """Shares of a whole, each with its colour, side by side; what is left stays empty."""
    text, end = Text(no_wrap=True), 0.0
    for colour, share in parts:
        before, end = round(min(1.0, end) * columns), end + share
        text.append("█" * (round(min(1.0, end) * columns) - before), colour)
    return text.append("·" * (columns - len(text)), NOTHING)


def spark(values: Sequence[float], top: float | None = None) -> str:
    """A line of little columns; the highest value, or `top`, fills one."""
    top = max(values, default=0.0) if top is None else top
    if top <= 0:
        return ""
    return "".join(TICKS[min(8, -int(-8 * value // top))] for value in values)


def fitted(values: Sequence[float], columns: int) -> list[float]:
    """As many values as there are columns at most: means of neighbours."""
    if len(values) <= columns:
        return list(values)
    cuts = [round(n * len(values) / columns) for n in range(columns + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]


def key(colour: str, name: str, rest: str = "") -> Text:
    """What a colour means. rest: said of it."""
    return Text.assemble(("■ ", colour), name, (f" {rest}" if rest else "", FAINT))


def listed(entries: Sequence[str | Text], columns: int, between: str = "  ") -> Text:
    """One after the other, in as many lines as that takes; lines end between entries, never within one."""
    mark = between.rstrip()
    text, used = Text(), 0
    for number, entry in enumerate(entries, 1):
        whole = Text.assemble(entry, mark if number < len(entries) else "")
        if used and used + len(between) - len(mark) + len(whole) > columns:
            text.append("\n")
            used = 0
        elif used:
            text.append(between[len(mark) :])
            used += len(between) - len(mark)
        text.append(whole)
        used += len(whole)
    return text
