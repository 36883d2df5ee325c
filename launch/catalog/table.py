"""The table of `neuronpipe models`: two lines for each model, within 80 columns, with colours on a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from neuronpipe.launch.catalog.estimates import PROMPT_TOKENS, Estimate
from neuronpipe.launch.formats import show_bytes, show_min_bytes
from neuronpipe.plans.number_format import show_range
from neuronpipe.protocol.frozen import frozen

COLUMNS = 80
NAME_COLUMNS = 20
HEADINGS = (
    f"{'':<{NAME_COLUMNS}}{'':>10}  {'memory':>10}  {'weights':>8}  {'':>10}  {'first':>7}",
    f"{'model':<{NAME_COLUMNS}}{'download':>10}  {'at least':>10}  {'resident':>8}  {'tokens/s':>10}  {'token':>7}",
)
LEGEND = (
    "at least: the smallest --memory that works; resident: the share of the feed-forward weights that stays within the "
    f"limit, while flash gives the rest; first token: after a prompt of {PROMPT_TOKENS} tokens. A run searches "
    "longer, and may find a plan that is up to 30 % faster"
)


@frozen(kw_only=True)
class Line:
    """A line of the table. style: how it looks on a terminal, as `rich` names styles; "" as other text"""

    text: str
    style: str = ""


def table_lines(estimates: Sequence[Estimate], pulled: frozenset[str], *, shows_others: bool) -> Iterator[Line]:
    """Yield the lines of a table of sorted estimates.

    pulled: names of the models that are on this disk
    shows_others: the models that do not run follow, with the reason
    """
    running = [estimate for estimate in estimates if estimate.runs]
    if running:
        yield from (Line(text=heading.rstrip(), style="bold") for heading in HEADINGS)
    was_usable = True
    for estimate in running:
        if was_usable and not estimate.is_usable:
            yield Line(text="slower than one reads, or slow to begin:", style="bold")
        was_usable = estimate.is_usable
        yield Line(text=_figures(estimate, is_pulled=estimate.model.name in pulled), style="" if was_usable else "dim")
        yield Line(text=f"  {describe(estimate)}", style="dim")
    if not shows_others:
        return
    for number, estimate in enumerate(estimate for estimate in estimates if not estimate.runs):
        if number == 0:
            yield Line(text="what does not run, and why:", style="bold")
        download = show_bytes(estimate.model.download_bytes)
        yield Line(text=f"{estimate.model.name:<{NAME_COLUMNS}}{download:>10}  {estimate.problem}", style="dim")


def _figures(estimate: Estimate, *, is_pulled: bool) -> str:
    size = "pulled" if is_pulled else show_bytes(estimate.model.download_bytes)
    min_memory = "" if estimate.min_memory_bytes is None else show_min_bytes(estimate.min_memory_bytes)
    share = "" if estimate.resident_share is None else f"{estimate.resident_share:.0%}"
    return (
        f"{estimate.model.name:<{NAME_COLUMNS}}{size:>10}  {min_memory:>10}  {share:>8}  "
        f"{_speed(estimate):>10}  {_seconds(estimate.first_token_s):>7}"
    )


def describe(estimate: Estimate) -> str:
    """Return what a model is good for, and its numbers of parameters."""
    whole, active = _count(estimate.parameters), _count(estimate.active_parameters)
    size = whole if estimate.active_parameters > estimate.parameters / 2 else f"{whole}, {active} active"
    return f"{size}: {estimate.model.note}"


def wrapped(text: str, *, indent: str = "", style: str = "") -> Iterator[Line]:
    """Yield a text as lines of at most COLUMNS. Commands in it are not broken."""
    lines = textwrap.wrap(
        text, COLUMNS - 1, initial_indent=indent, subsequent_indent=indent, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    return (Line(text=line, style=style) for line in lines)


def print_lines(lines: Sequence[Line], *, in_colour: bool) -> None:
    """Print lines to stdout. in_colour: with their styles, for a terminal"""
    if not in_colour:
        print("\n".join(line.text for line in lines))
        return
    from rich.console import Console  # imported here: only a terminal pays for it
    from rich.text import Text

    console = Console(highlight=False)
    for line in lines:
        console.print(Text(line.text, style=line.style), soft_wrap=True)


def as_json(estimate: Estimate, *, is_pulled: bool) -> dict[str, Any]:
    """Return the fields of a model for scripts. Figures that are not known are null."""
    model, speeds = estimate.model, estimate.tokens_per_s_range
    return {
        "name": model.name,
        "note": model.note,
        "reference": model.reference,
        "licence": model.licence,
        "parameters": estimate.parameters,
        "active_parameters": estimate.active_parameters,
        "download_bytes": model.download_bytes,
        "package_bytes": estimate.package_bytes,
        "pulled": is_pulled,
        "runs": estimate.runs,
        "usable": estimate.is_usable,
        "problem": estimate.problem,
        "min_memory_bytes": estimate.min_memory_bytes,
        "resident_share": None if estimate.resident_share is None else round(estimate.resident_share, 4),
        "tokens_per_s": estimate.tokens_per_s,
        "tokens_per_s_range": None if speeds is None else {"low": speeds.low, "high": speeds.high},
        "first_token_s": estimate.first_token_s,
    }


def _count(parameters: int) -> str:
    return f"{parameters / 1e6:.0f}M" if parameters < 0.95e9 else f"{parameters / 1e9:.1f}B"


def _speed(estimate: Estimate) -> str:
    speeds, median = estimate.tokens_per_s_range, estimate.tokens_per_s
    if speeds is not None:
        return show_range(speeds.low, speeds.high, word="-")
    return "?" if median is None else show_range(median, median)


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
