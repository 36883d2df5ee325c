"""The building blocks of the screen: colours, bars of shares, trends and lists, within a given number of columns."""

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
"""The colours of pictures, some of them changed for a dark background."""
REGIONS = {"fixed": "#0072b2", "kv": "#56b4e9", "hot": "#009e73", "cold": "#e69f00"}
TICKS = " ▁▂▃▄▅▆▇█"


def bar(parts: Iterable[tuple[str, float]], columns: int) -> Text:
    """Draw shares of a whole side by side, each in its colour; the remainder stays empty."""
    text, end = Text(no_wrap=True), 0.0
    for colour, share in parts:
        before, end = round(min(1.0, end) * columns), end + share
        text.append("█" * (round(min(1.0, end) * columns) - before), colour)
    return text.append("·" * (columns - len(text)), NOTHING)


def spark(values: Sequence[float], top: float | None = None) -> str:
    """Draw values as a line of small columns. The highest value, or `top`, fills a column."""
    top = max(values, default=0.0) if top is None else top
    if top <= 0:
        return ""
    return "".join(TICKS[min(8, -int(-8 * value // top))] for value in values)


def fitted(values: Sequence[float], columns: int) -> list[float]:
    """Return at most as many values as there are columns, by averaging neighbours."""
    if len(values) <= columns:
        return list(values)
    cuts = [round(n * len(values) / columns) for n in range(columns + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]


def key(colour: str, name: str, detail: str = "") -> Text:
    """Return the legend entry of a colour.

    detail: text after its name
    """
    return Text.assemble(("■ ", colour), name, (f" {detail}" if detail else "", FAINT))


def listed(entries: Sequence[str | Text], columns: int, between: str = "  ") -> Text:
    """Join entries in as many lines as needed; lines break between entries, never within one."""
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
