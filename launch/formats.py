"""How sizes, shares, texts and commands are written by people and for them."""

from __future__ import annotations

import argparse
import os
import re
import shlex

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
ONLY_UTF8 = "not UTF-8, which texts have to be; `iconv -f latin1 -t utf-8` makes Latin-1 so"


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


def as_typed(text: str) -> str:
    """A text for a person, whose commands in backticks begin as this one was typed. Whoever writes such a text, further
    down, knows `neuronpipe` only."""
    return text.replace("`neuronpipe ", f"`{typed_command()} ")


def typed_command() -> str:
    """`neuronpipe`, or the path of the script of a checkout."""
    return shlex.quote(os.environ.get("NEURONPIPE_COMMAND") or "neuronpipe")


def line_to_paste(*words: object) -> str:
    """This command with other words, quoted for the shell where they need it."""
    return f"{typed_command()} {shlex.join(map(str, words))}"


def parse_text(text: str) -> str:
    """A text among the arguments. For argparse: raises ArgumentTypeError for bytes that are none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(ONLY_UTF8) from None
    return text
