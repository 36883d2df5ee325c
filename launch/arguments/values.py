"""Parsers of option values, for argparse: each raises ArgumentTypeError for a text that it does not accept."""

from __future__ import annotations

import argparse
import math
import re
from decimal import Decimal

from neuronpipe.launch.formats import ONLY_UTF8
from neuronpipe.launch.planning import AUTO
from neuronpipe.plans.planner.plan_options import UNIT_BYTES, MemoryLimit

MAX_BYTES = 1 << 60
MIN_PLAUSIBLE_BYTES = 1 << 20  # every size option is about memory: a smaller value lacks its unit
LIKELY_MIB = 64  # a number without unit is more likely meant in MiB from here on, in GiB below
PREFIXES = "KMGTPE"
UNITS = (
    {"": 1, "B": 1}
    | {f"{prefix}{end}": 1 << 10 * power for power, prefix in enumerate(PREFIXES, 1) for end in ("", "IB")}
    | {f"{prefix}B": 10 ** (3 * power) for power, prefix in enumerate(PREFIXES, 1)}
)


def parse_bytes(text: str) -> int:
    """Parse `1500000`, `512MiB`, `1.5GiB`, `2G` (binary) or `800MB` (decimal); refuse implausibly small sizes.

    The result is a `MemoryLimit`: an answer about it is in the unit that was typed."""
    return _parse_size(text, "")


def parse_bytes_or_none(text: str) -> int:
    """Parse a size, or `0` for none."""
    return 0 if text.strip() == "0" else _parse_size(text, ", or 0 for none")


def parse_limit(text: str) -> int:
    """Parse a size, or `auto` as AUTO."""
    return AUTO if text.strip() == "auto" else _parse_size(text, ", or auto")


def _parse_size(text: str, alternative: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match.group(2).upper() not in UNITS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; write bytes, or a number with MiB or GiB{alternative}"
        )
    suffix = match.group(2).upper()
    size = Decimal(match.group(1)) * UNITS[suffix]  # exact: what a refusal suggests must be enough
    if not 1 <= size <= MAX_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r}: a size must be above zero, and up to 1 EiB{alternative}")
    if size < MIN_PLAUSIBLE_BYTES:
        unit = "GiB" if float(match.group(1)) < LIKELY_MIB else "MiB"
        bytes_text = f"{int(size):,} byte{'' if int(size) == 1 else 's'}"
        raise argparse.ArgumentTypeError(f"{text!r} is {bytes_text}; did you mean {match.group(1)}{unit}?")
    return MemoryLimit(int(size), text.strip(), _shown_unit(suffix))


def _shown_unit(suffix: str) -> str:
    """Return the unit of answers to a size with this suffix, in capitals: TiB and more are answered in GiB."""
    if suffix in ("", "B"):
        return "bytes"
    unit = suffix[0] + ("B" if suffix[1:] == "B" else "iB")
    return unit if unit in UNIT_BYTES else f"G{unit[1:]}"


def parse_share(text: str) -> float:
    """Parse `50%` or `0.5` as a share between 0 and 1."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text)
    share = float(match.group(1)) / (100 if match.group(2) else 1) if match else -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share; write 50% or 0.5")
    return share


def parse_speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = math.nan
    if not 0 < speed < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a speed; write tokens per second, e.g. 10")
    return speed


def parse_time(text: str) -> float:
    """Parse `30s`, `5m`, `2h` or `forever` (infinity) as seconds."""
    if text.strip() == "forever":
        return math.inf
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d+)?)\s*(s|m|h)\s*", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; write 30s, 5m, 2h or forever")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def parse_count(text: str) -> int:
    """Parse a whole number of at most nine digits. The caller checks the range."""
    if re.fullmatch(r"\s*-?\d{1,9}\s*", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number; write e.g. 4")
    return int(text)


def parse_cores(text: str) -> tuple[int, ...]:
    """Parse a list of cores, e.g. `0,2-3`."""
    cores: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match is None or int(match[1]) > int(match[2] or match[1]):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of cores; write 0,2-3")
        cores.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(cores))


def parse_text(text: str) -> str:
    """Return the text if it is valid UTF-8, which bytes of a command line need not be."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(ONLY_UTF8) from None
    return text
