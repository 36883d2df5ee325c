"""How sizes, shares, texts and commands are written by people and for them."""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
from collections.abc import Iterable

MAX_BYTES = 1 << 60
MIN_PLAUSIBLE_BYTES = 1 << 20  # every size that a person types is of memory: less is a forgotten unit
LIKELY_MIB = 64  # from here on a number without its unit is more likely of MiB than of GiB
UNITS = {
    "": 1,
    "B": 1,
    "K": 1 << 10,
    "KIB": 1 << 10,
    "M": 1 << 20,
    "MIB": 1 << 20,
    "G": 1 << 30,
    "GIB": 1 << 30,
    "T": 1 << 40,
    "TIB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
ONLY_UTF8 = "not UTF-8, which texts have to be; `iconv -f latin1 -t utf-8` makes Latin-1 so"


AUTO = -1
"""In place of a limit in bytes: what is available, whenever that changes."""


def parse_bytes(text: str) -> int:
    """`1500000`, `512MiB`, `1.5GiB`, `2G` (binary), `800MB` (decimal). For argparse: raises ArgumentTypeError, also for
    a size that is too small to be meant."""
    return _parse_size(text, "")


def parse_limit(text: str) -> int:
    """A size, or `auto`: AUTO. For argparse: raises ArgumentTypeError."""
    return AUTO if text.strip() == "auto" else _parse_size(text, ", or auto")


def _parse_size(text: str, or_else: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match.group(2).upper() not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write bytes, or a number with MiB or GiB{or_else}")
    size = float(match.group(1)) * UNITS[match.group(2).upper()]
    if not 1 <= size <= MAX_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r}: a size must be above zero, and up to 1 EiB{or_else}")
    if size < MIN_PLAUSIBLE_BYTES:
        unit = "GiB" if float(match.group(1)) < LIKELY_MIB else "MiB"
        raise argparse.ArgumentTypeError(f"{text!r} is {_plain_bytes(int(size))}; did you mean {match.group(1)}{unit}?")
    return int(size)


def _plain_bytes(size: int) -> str:
    return f"{size:,} byte{'' if size == 1 else 's'}"


def parse_share(text: str) -> float:
    """`50%` or `0.5`, as a share between 0 and 1."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text)
    share = float(match.group(1)) / (100 if match.group(2) else 1) if match else -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share; write 50% or 0.5")
    return share


def parse_speed(text: str) -> float:
    """`10`, in tokens per second. For argparse: raises ArgumentTypeError."""
    try:
        speed = float(text)
    except ValueError:
        speed = math.nan
    if not 0 < speed < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no speed; write tokens per second, e.g. 10")
    return speed


def parse_time(text: str) -> float:
    """`30s`, `5m`, `2h`, `forever`, in seconds. For argparse: raises ArgumentTypeError."""
    if text.strip() == "forever":
        return math.inf
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d+)?)\s*(s|m|h)\s*", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write 30s, 5m, 2h or forever")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def parse_count(text: str) -> int:
    """`4`. For argparse: raises ArgumentTypeError."""
    if re.fullmatch(r"\s*-?\d{1,9}\s*", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number; write e.g. 4")
    return int(text)


def parse_cores(text: str) -> tuple[int, ...]:
    """`0,2-3`. For argparse: raises ArgumentTypeError."""
    cores: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match is None or int(match[1]) > int(match[2] or match[1]):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of cores; write 0,2-3")
        cores.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(cores))


def show_cores(cores: Iterable[int]) -> str:
    """`0-3, 6`, of numbers that rise."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def show_bytes(size: float) -> str:
    """`12.3 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def show_time(seconds: float) -> str:
    """`30s`, `5m`, `2h`, `forever`."""
    if math.isinf(seconds):
        return "forever"
    units = [(3600, "h"), (60, "m"), (1, "s")]
    size, unit = next(((size, unit) for size, unit in units if seconds >= size and seconds % size == 0), (1, "s"))
    return f"{seconds / size:g}{unit}"


def show_left(seconds: float) -> str:
    """`3 s left`, `2 min left`."""
    if seconds < 120:
        return f"{math.ceil(seconds)} s left"
    return f"{math.ceil(seconds / 60)} min left"


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
