"""Bytes and shares as people write them."""

from __future__ import annotations

import argparse
import re

MAX_BYTES = 1 << 60
UNITS = {
    "": 1,
    "B": 1,
    "K": 1 << 10,
    "KIB": 1 << 10,
    "M": 1 << 20,
    "MIB": 1 << 20,
    "G": 1 << 30,
    "GIB": 1 << 30,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


def parse_bytes(text: str) -> int:
    """`1500000`, `512MiB`, `1.5GiB`, `2G` (binary), `800MB` (decimal). For argparse: raises ArgumentTypeError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match.group(2).upper() not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write bytes, or a number with MiB or GiB")
    size = float(match.group(1)) * UNITS[match.group(2).upper()]
    if not 1 <= size <= MAX_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r}: a size must be above zero, and below {show_bytes(MAX_BYTES)}")
    return int(size)


def parse_share(text: str) -> float:
    """`50%` or `0.5`, as a share between 0 and 1."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text)
    share = float(match.group(1)) / (100 if match.group(2) else 1) if match else -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share; write 50% or 0.5")
    return share


def show_bytes(size: float) -> str:
    """`12.3 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
