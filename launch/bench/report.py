"""Benchmark rows as tables: results, where the time went, the plan's errors, ratios to an earlier measurement."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from neuronpipe.launch.formats import show_bytes
from neuronpipe.plans.number_format import show_number, show_range
from neuronpipe.protocol.errors import UserError

Row = dict[str, Any]
COMPARED = ("test", "mode", "workload", "batch")
"""Fields that must be equal to compare two rows. Package, workers and residency may differ."""

DEFAULTS = {"batch": 1}
"""Values for rows that were saved before the field existed."""

PLANNED_HEADS = ("compared with the plan", "test", "measured", "planned", "error")
MAX_PERCENT_ERROR = 10.0  # larger errors are shown as factors


def render(rows: Sequence[Row]) -> str:
    speeds = table(
        ("test", "tokens/s", "least .. most", "peak memory"),
        (
            (
                row["test"],
                show_number(row["tokens_per_s"]),
                f"{show_number(row['tokens_per_s_least'])} .. {show_number(row['tokens_per_s_most'])}",
                show_bytes(row["peak_memory_bytes"]),
            )
            for row in rows
        ),
    )
    names = [row["test"] for row in rows]
    lines = [(label, *(show(row) for row in rows)) for label, show in _FIGURES]
    lines = [line for line in lines if any(cell != "-" for cell in line[1:])]
    parts = [_head(rows[0]), speeds, table(("where the time went", *names), lines)]
    parts += [planned_table(rows)] if any(row["planned"] for row in rows) else []
    parts += [f"Medians of {rows[0]['repetitions']}, after a warm-up.\n"]
    return "\n".join(parts)


def _head(row: Row) -> str:
    package = f"{row['model']}, {show_bytes(row['model_bytes'])} on flash, {row['quantization']}"
    if row["workload"] is not None:
        package += f", workload {row['workload']}"
    workers = f"{row['workers']} worker{'s' if row['workers'] > 1 else ''}"
    run = f"{row['mode']} mode, {workers}, {row['ffn_resident']:.0%} of feed-forward resident"
    if row["batch"] > 1:
        run += f", {row['batch']} sequences at once"
    return f"{package}\n{run}, limit {show_bytes(row['limit_memory_bytes'])}\n"


def planned_table(rows: Sequence[Row]) -> str:
    return table(PLANNED_HEADS, planned_lines(rows))


def planned_lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return a line for each planned figure of each test, with the columns of PLANNED_HEADS."""
    lines: list[tuple[str, ...]] = []
    for row in rows:
        for name, (label, show) in _PLANNED.items():
            if name == "prefill_tokens_per_s" and row["prefill_tokens_per_s"] == row["tokens_per_s"]:
                continue  # the test is a prompt
            if name in row["planned"]:
                value = row[name]
                measured = "-" if value is None else show(value)
                lines.append((label, row["test"], measured, _planned(row, name, show), show_error(row["error"][name])))
    return lines


def _planned(row: Row, name: str, show: Callable[[float], str]) -> str:
    """Return a planned figure, with its range if the row has one."""
    speeds = row.get("planned_range", {}).get(name)
    if speeds is None:
        return show(row["planned"][name])
    return f"{show(row['planned'][name])} ({show_range(speeds['low'], speeds['high'])})"


def show_error(error: float | None) -> str:
    """Return `+12%`, or a factor such as `x12` for large errors."""
    if error is None:
        return "-"
    return f"{error:+.0%}" if error < MAX_PERCENT_ERROR else f"x{1 + error:.0f}"


def compare(rows: Sequence[Row], earlier: Sequence[Row], file: Path) -> str:
    """Return the table of ratios to the rows of an earlier measurement, for the tests that both have."""
    lines = []
    for row in rows:
        for old in earlier:
            if all(row.get(name) == old.get(name, DEFAULTS.get(name)) for name in COMPARED):
                lines.append((row["test"], row["mode"], *(_ratio(show(row), show(old)) for _, show in _RATIOS)))
    if not lines:
        return f"{file} has none of these tests in this mode and workload.\n"
    return f"Against {file}, new / old:\n\n{table(('test', 'mode', *(name for name, _ in _RATIOS)), lines)}"


def read_rows(file: Path) -> list[Row]:
    """Read the rows that `bench --json` wrote. Raises UserError that names the file and the missing field."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{file}: not JSON; write it with `neuronpipe bench --json`") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{file}: expected a list of rows; write it with `neuronpipe bench --json`")
    for number, row in enumerate(rows):
        for name in ("test", "mode"):
            if not isinstance(row.get(name), str):
                raise UserError(f"{file}: row {number}: field '{name}' is missing or not text")
        for name in ("tokens_per_s", "flash_bytes_per_token", "peak_memory_bytes"):
            if type(row.get(name)) not in (int, float):
                raise UserError(f"{file}: row {number}: field '{name}' is missing or not a number")
        if not isinstance(row.get("tbt_ms"), dict):
            raise UserError(f"{file}: row {number}: field 'tbt_ms' is missing or not an object")
    return rows


def _share_of(name: str) -> Callable[[Row], str]:
    return lambda row: "-" if row[name] is None else f"{row[name]:.1%}"


def _bytes_of(name: str) -> Callable[[Row], str]:
    return lambda row: show_bytes(row[name])


def _gap_of(name: str) -> Callable[[Row], str]:
    return lambda row: "-" if row["tbt_ms"].get(name) is None else f"{row['tbt_ms'][name]:.2f}"


def _guessed(row: Row) -> str:
    """Return the experts prefetched per token, and the share of them that was needed."""
    if row["guessed_right_share"] is None:
        return "-"
    return f"{show_number(row['experts_guessed_per_token'], 1)}, {row['guessed_right_share']:.0%} right"


def _number_of(name: str, decimals: int) -> Callable[[Row], str]:
    return lambda row: "-" if row[name] is None else show_number(row[name], decimals)


_FIGURES: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("memory read per token", _bytes_of("dram_bytes_per_token")),
    ("  of the memory's speed", _share_of("dram_limit_fraction")),
    ("flash read per token", _bytes_of("flash_bytes_per_token")),
    ("  reads", _number_of("flash_reads_per_token", 1)),
    ("  of the flash's speed", _share_of("flash_limit_fraction")),
    ("neurons active", _share_of("active_share")),
    ("miss rate", _share_of("miss_rate")),
    ("  late: still missing when needed", _share_of("late_rate")),
    ("  of activated neurons", _share_of("late_rate_of_activated")),
    ("experts prefetched while flash was idle", _guessed),
    ("hints, clusters", _number_of("hints_per_token", 1)),
    ("  right: they fired", _share_of("hints_right")),
    ("exposed I/O", _share_of("exposed_io_share")),
    ("coordination", _share_of("coordination_share")),
    ("  waiting for other participants", _share_of("barrier_share")),
    ("  messages and Python", _share_of("message_share")),
    ("time between tokens, ms, p50", _gap_of("p50")),
    ("  p90", _gap_of("p90")),
    ("  p99", _gap_of("p99")),
    ("  the longest", _number_of("tbt_most_ms", 2)),
    ("first token of the first request, ms", _number_of("first_token_ms", 1)),
    ("first tokens of it, tokens/s", _number_of("first_tokens_per_s", 1)),
    ("energy per token, J", _number_of("joules_per_token", 3)),
)

_PLANNED: dict[str, tuple[str, Callable[[float], str]]] = {
    "tokens_per_s": ("tokens/s", show_number),
    "prefill_tokens_per_s": ("  of the prompt alone", show_number),
    "first_token_ms": ("first token, ms", show_number),
    "miss_rate": ("miss rate", "{:.1%}".format),
    "flash_bytes_per_token": ("flash read per token", show_bytes),
    "flash_reads_per_token": ("  reads", show_number),
    "exposed_io_share": ("exposed I/O", "{:.1%}".format),
    "dram_bytes_per_token": ("memory read per token", show_bytes),
    "peak_memory_bytes": ("peak memory", show_bytes),
}

_RATIOS: tuple[tuple[str, Callable[[Row], float | None]], ...] = (
    ("tokens/s", lambda row: row["tokens_per_s"]),
    ("TBT p50", lambda row: row["tbt_ms"].get("p50")),
    ("TBT p99", lambda row: row["tbt_ms"].get("p99")),
    ("flash bytes", lambda row: row["flash_bytes_per_token"]),
    ("peak memory", lambda row: row["peak_memory_bytes"]),
)


def _ratio(new: float | None, old: float | None) -> str:
    return "-" if not new or not old else f"{new / old:.2f}"


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return aligned columns: the first one to the left, the others to the right."""
    cells = [tuple(heads), *map(tuple, lines)]
    widths = [max(len(line[n]) for line in cells) for n in range(len(heads))]
    cells.insert(1, tuple("-" * width for width in widths))
    return "".join(_line(line, widths) for line in cells)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
    return "  ".join((cells[0].ljust(widths[0]), *padded[1:])).rstrip() + "\n"
