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


def show_range(low: float, high: float, word: str = " to ") -> str:
    """Format a range with two significant digits at each end, `1.2 to 15` or `2,100 to 2,900`; one number if both ends
    look the same. word: what stands between the ends"""
    ends = [_two_digits(end) for end in (low, high)]
    return ends[0] if ends[0] == ends[1] else word.join(ends)


def _two_digits(value: float) -> str:
    if not value or not math.isfinite(value):
        return f"{value:,.0f}"
    rounded = float(f"{value:.1e}")
    decimals = min(MAX_DECIMALS, max(0, 1 - math.floor(math.log10(abs(rounded)))))
    return f"{rounded:,.{decimals}f}"
