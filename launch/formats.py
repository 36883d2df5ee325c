"""Sizes, times, cores and commands as text for people."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterable

ONLY_UTF8 = "not UTF-8, the only encoding that is read; `iconv -f latin1 -t utf-8` converts Latin-1"


def show_cores(cores: Iterable[int]) -> str:
    """Return ascending core numbers as ranges, e.g. `0-3, 6`."""
    ranges: list[list[int]] = []
    for core in cores:
        if ranges and core == ranges[-1][-1] + 1:
            ranges[-1].append(core)
        else:
            ranges.append([core])
    return ", ".join(str(cores[0]) if len(cores) == 1 else f"{cores[0]}-{cores[-1]}" for cores in ranges)


def show_bytes(size: float) -> str:
    """Return a size in binary units, e.g. `12.3 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def show_min_bytes(size_bytes: int) -> str:
    """Return a size as `show_bytes`, but rounded up: a limit of what is shown is large enough."""
    gib_hundredths, mib_tenths = (-(-size_bytes * parts // unit) for parts, unit in ((100, 1 << 30), (10, 1 << 20)))
    return f"{gib_hundredths / 100:.2f} GiB" if mib_tenths >= 10240 else f"{mib_tenths / 10:.1f} MiB"


def show_time(seconds: float) -> str:
    """Return a duration as it is typed: `30s`, `5m`, `2h`, `forever`."""
    if math.isinf(seconds):
        return "forever"
    units = [(3600, "h"), (60, "m"), (1, "s")]
    size, unit = next(((size, unit) for size, unit in units if seconds >= size and seconds % size == 0), (1, "s"))
    return f"{seconds / size:g}{unit}"


def show_left(seconds: float) -> str:
    """Return a remaining time, e.g. `3 s left`, `2 min left`."""
    if seconds < 120:
        return f"{math.ceil(seconds)} s left"
    return f"{math.ceil(seconds / 60)} min left"


def as_typed(text: str) -> str:
    """Return the text with its `neuronpipe ...` commands as this user types them.

    Lower layers write `neuronpipe` in messages; in a checkout the command is a path.
    """
    return text.replace("`neuronpipe ", f"`{typed_command()} ")


def typed_command() -> str:
    """Return `neuronpipe`, or the path of the script of a checkout."""
    return shlex.quote(os.environ.get("NEURONPIPE_COMMAND") or "neuronpipe")


def line_to_paste(*words: object) -> str:
    """Return a command line of this program, quoted for the shell."""
    return f"{typed_command()} {shell_line(map(str, words))}"


def shell_line(words: Iterable[str]) -> str:
    """Return words quoted for the shell, on one line; control characters become escapes within $'...'."""
    return " ".join(shlex.quote(word) if word.isprintable() else _dollar_quoted(word) for word in words)


def _dollar_quoted(word: str) -> str:
    data = word.encode(errors="surrogateescape")
    return "$'" + "".join(chr(b) if 32 <= b < 127 and b not in b"'\\" else f"\\x{b:02x}" for b in data) + "'"
