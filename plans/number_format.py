"""Formatting of numbers for people."""

from __future__ import annotations

import math

MAX_DECIMALS = 6


def show_number(value: float, decimals: int = 1) -> str:
    """Format a number with `decimals` decimals, or up to MAX_DECIMALS if it needs them for two significant digits:
    `1,234.5`, `7.3`, `0.0042`."""
    if value and math.isfinite(value):
        decimals = max(decimals, min(MAX_DECIMALS, 1 - math.floor(math.log10(abs(value)))))
    return f"{value:,.{decimals}f}"
