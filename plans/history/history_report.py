"""A history as text: the last runs with their plans, and what was counted."""

from __future__ import annotations

import time
from collections.abc import Callable

from neuronpipe.plans.history.history import History, RunRecord
from neuronpipe.plans.history.planning_facts import MIN_COUNTED_TOKENS
from neuronpipe.plans.history.run_terms import TokenTerms, show_mebibytes, show_milliseconds, show_percent

_COLUMNS: tuple[tuple[str, Callable[[TokenTerms], float | None], Callable[[float], str]], ...] = (
    ("misses", lambda terms: terms.miss_rate, show_percent),
    ("flash", lambda terms: terms.flash_bytes, show_mebibytes),
    ("waits", lambda terms: terms.wait_ms, show_milliseconds),
    ("kernels", lambda terms: terms.compute_ms, show_milliseconds),
    ("token", lambda terms: terms.ms, show_milliseconds),
)


def runs_table(history: History) -> str:
    """Return the last runs as a table, planned and measured by token, the newest first; empty if there are none."""
    if not history.runs:
        return ""
    rows = [("ended", "tokens", *(name for name, _, _ in _COLUMNS))]
    rows += [_row(run) for run in reversed(history.runs)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(("earlier runs, planned -> measured for each token", *(f"  {line}" for line in lines))) + "\n"


def _row(run: RunRecord) -> tuple[str, ...]:
    def cell(value: Callable[[TokenTerms], float | None], show: Callable[[float], str]) -> str:
        planned, measured = (value(terms) for terms in (run.planned, run.measured))
        return " -> ".join("-" if figure is None else show(figure) for figure in (planned, measured))

    ended = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.ended_at))
    return (ended, f"{run.tokens:,}", *(cell(value, show) for _, value, show in _COLUMNS))


def counted_line(history: History) -> str:
    """Return in one line what runs have counted, and whether plans use it; empty if they have counted nothing."""
    counted = [f"{counts.tokens:,} tokens in {counts.mode} mode" for counts in history.counts if counts.tokens]
    if not counted:
        return ""
    line = f"runs have counted {', '.join(counted)}"
    if all(counts.tokens < MIN_COUNTED_TOKENS for counts in history.counts):
        line += f"; plans use them from {MIN_COUNTED_TOKENS:,} on"
    return line
