"""Planned and measured figures over a grid: `neuronpipe bench` with 40, 50, 60, 75 and 100 % resident, exact and
predicted, one and two workers, one and four sequences.

    python tests/bench/planned.py [PACKAGE] [--rows FILE.jsonl] [--subset resident=50,mode=predicted] [--tests tg128]

Each cell is a `bench` of its own, appended to the file when it is measured. Started again with the same file, package
and options it measures the missing and the refused cells, so it may be interrupted at any time. --table prints a file
and measures nothing. Not a test: it asserts nothing. Nothing else may run meanwhile.

`planned` has the keys of the measured row, computed by plans/cost/token_time.py for its mode, workers, sequences,
prompt and the position in the middle of the decoded tokens. `error` is (planned - measured) / measured, null where zero
was measured and not planned. A key is absent where the plan has no such figure or the device was not measured.

    key                       measured                                    planned
    tokens_per_s              median of the repetitions; of several       sequences over the time of a step; with a
                              sequences, all tokens while all are decoded prompt, all tokens over the time of both
    prefill_tokens_per_s      tokens of the prompt over the time to first each weight that a token of the chunk wants,
                              token, median                               once, and flash beyond that
    first_token_ms            of the first request, with a cold cache     from a cache with the hottest neurons
    miss_rate                 cluster parts absent when first looked up,  the same; absent for prompts, as are flash and
                              over looked up parts                        memory
    flash_reads_per_token,    the loader's reads during the steps, gaps   parts that miss, joined where all of a
    flash_bytes_per_token     and prefetches included                     feed-forward come in order
    dram_bytes_per_token      matrices once a step; gates once a step if  the same
                              all are computed; other rows once a token;
                              keys and values within the window
    exposed_io_share          waiting of workers for flash over the time  flash time that computing does not hide
                              of the tokens, mean over workers
    peak_memory_bytes         proportional set size of the whole run      the plan's budget

Predicted mode looks up the clusters that the predictor names; a cluster whose gate is absent misses once. Exact and
thresholded mode look up all gates (of chosen experts), and up and down of clusters that fired. The few gates that were
not looked up ahead (the first block window of a step) are taken to miss as often. `late_rate` is the share that was
still absent when it was needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from neuronpipe.launch.bench.planned import relative_error  # noqa: E402
from neuronpipe.launch.bench.report import show_error  # noqa: E402
from neuronpipe.launch.formats import show_bytes  # noqa: E402
from neuronpipe.launch.planning import DEMO  # noqa: E402
from neuronpipe.plans.number_format import show_number  # noqa: E402
from neuronpipe.plans.package.reader import Package  # noqa: E402
from neuronpipe.protocol.errors import UserError  # noqa: E402

from tests.bench.ablations import bench  # noqa: E402

Row = dict[str, Any]
CellKey = dict[str, Any]
"""The identity of a cell: its place in the grid, the package and the options of the measurement."""

GRID: dict[str, tuple[Any, ...]] = {
    "batch": (1, 4),
    "workers": (2, 1),
    "mode": ("predicted", "exact"),
    "resident": (50, 100, 75, 60, 40),  # percent, the most informative first
}


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A column of the table. target: returns True if an error is within the target."""

    name: str
    title: str
    show: Callable[[float], str]
    target: Callable[[float], bool]
    target_text: str


QUANTITIES = (
    Quantity("tokens_per_s", "tokens/s", show_number, lambda e: abs(e) <= 0.1, "within 10 %"),
    Quantity("miss_rate", "misses", "{:.1%}".format, lambda e: abs(e) <= 0.15, "within 15 %"),
    Quantity("flash_bytes_per_token", "flash a token", show_bytes, lambda e: abs(e) <= 0.15, "within 15 %"),
    # Memory must never exceed the plan.
    Quantity(
        "peak_memory_bytes", "peak memory", show_bytes, lambda e: 0 <= e <= 0.03, "within 3 % and never above the plan"
    ),
)


# ---- cells ---------------------------------------------------------------------------------------------------
def cells(subset: dict[str, tuple[str, ...]], *, predictor: bool) -> list[Row]:
    """Return the cells of a subset of the grid in the order of measuring. Predicted mode needs a predictor."""
    cells_so_far: list[Row] = [{}]
    for name, values in GRID.items():
        subset_values = [value for value in values if name not in subset or str(value) in subset[name]]
        cells_so_far = [{**cell, name: value} for cell in cells_so_far for value in subset_values]
    return [cell for cell in cells_so_far if predictor or cell["mode"] != "predicted"]


def parse_subset(text: str) -> dict[str, tuple[str, ...]]:
    """Parse a subset such as `resident=50+75,mode=exact`. Raises ArgumentTypeError."""
    subset = {}
    for word in text.split(","):
        name, _, values = (part.strip() for part in word.partition("="))
        if name not in GRID:
            raise argparse.ArgumentTypeError(f"{word!r}: write NAME=VALUE with one of {', '.join(GRID)}")
        subset[name] = tuple(value.strip().removesuffix("%").strip() for value in values.split("+"))
        if unknown := set(subset[name]) - set(map(str, GRID[name])):
            raise argparse.ArgumentTypeError(
                f"{name}={min(unknown)}: the grid has {', '.join(map(str, sorted(GRID[name])))}"
            )
    return subset


def bench_words(key: CellKey) -> tuple[str, ...]:
    """Return the options of `neuronpipe bench` for a cell."""
    words = ["--ffn-resident", f"{key['resident']}%", "--mode", key["mode"]]
    for name in ("workers", "batch", "tests", "repetitions", "context", "workload"):
        if key[name] is not None:
            words += [f"--{name}", str(key[name])]
    return tuple(words)


# ---- the file ------------------------------------------------------------------------------------------------
def read_lines(file: Path) -> list[Row]:
    """Return the lines of a file, without a last one that was cut off. Raises UserError for any other invalid line."""
    if not file.exists():
        return []
    complete_lines = []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            complete_lines.append({"asked": dict(line["asked"]), "row": line["row"], "refused": line["refused"]})
        except (ValueError, KeyError, TypeError):
            if number == len(lines) and not text.endswith("\n"):
                return complete_lines
            raise UserError(f"{file}: line {number}: not a line that this program wrote; take another --rows") from None
    return complete_lines


def add_line(file: Path, key: CellKey, result: list[Row] | str) -> Row:
    """Append a cell's row, or the reason why `bench` refused it."""
    row, refused = (None, result) if isinstance(result, str) else (result[0], None)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    content = file.read_bytes() if file.exists() else b""
    if content and not content.endswith(b"\n"):  # a line that was cut off
        file.write_bytes(content[: content.rfind(b"\n") + 1])
    line = {"asked": key, "row": row, "refused": refused, "measured_at": now}
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(line) + "\n")
    return line


def done_cell(lines: Iterable[Row], key: CellKey) -> Row | None:
    """Return the last measured line of a cell. A refused cell is measured again."""
    answers = [line for line in lines if line["asked"] == key and line["row"] is not None]
    return answers[-1] if answers else None


# ---- the table -----------------------------------------------------------------------------------------------
def markdown(lines: Iterable[Row]) -> str:
    """Return the table of planned / measured and errors in the grid's order, and the numbers within the targets."""
    last = {json.dumps(line["asked"], sort_keys=True): line for line in lines}
    ordered = sorted(
        last.values(), key=lambda line: [line["asked"][name] for name in ("mode", "workers", "batch", "resident")]
    )
    heads = ["resident", "mode", "workers", "sequences", "disk, MB/s before, after"]
    for quantity in QUANTITIES:
        heads += [f"{quantity.title}, planned / measured", "error"]
    table_lines = [table_line(heads), "|---" * len(heads) + "|"]
    for line in ordered:
        key, row = line["asked"], line["row"]
        cell = [f"{key['resident']} %", key["mode"], str(key["workers"]), str(key["batch"])]
        cell.append(", ".join(f"{speed:.0f}" for speed in (row or {}).get("flash_mb_per_s", ())) or "-")
        for quantity in QUANTITIES:
            cell += ["refused", "-"] if row is None else _figures(quantity, row)
        table_lines.append(table_line(cell))
    rows = [line["row"] for line in ordered if line["row"] is not None]
    table_lines += ["", *(_summary(quantity, rows) for quantity in QUANTITIES)]
    refused = [line for line in ordered if line["row"] is None]
    table_lines += [f"- refused: {' '.join(bench_words(line['asked']))}: {line['refused']}" for line in refused]
    return "\n".join(table_lines) + "\n"


def _figures(quantity: Quantity, row: Row) -> list[str]:
    planned, measured = row["planned"].get(quantity.name), row[quantity.name]
    if planned is None:
        return [f"- / {quantity.show(measured)}", "-"]
    return [f"{quantity.show(planned)} / {quantity.show(measured)}", show_error(relative_error(planned, measured))]


def _summary(quantity: Quantity, rows: Iterable[Row]) -> str:
    errors = [row["error"][quantity.name] for row in rows if row["error"].get(quantity.name) is not None]
    if not errors:
        return f"- {quantity.title}: no errors to sum up"
    within = sum(map(quantity.target, errors))
    return (
        f"- {quantity.title}: {within} of {len(errors)} {quantity.target_text}; error's size: median "
        f"{statistics.median(map(abs, errors)):.0%}, at most {max(map(abs, errors)):.0%}"
    )


def table_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


# ---- the disk -----------------------------------------------------------------------------------------------
def measured_flash_mb_per_s(package: Path) -> float:
    """Measure flash again, for the plans that follow. Return the speed of random reads of 8 KiB at depth 32."""
    words = [str(ROOT / "launch" / "neuronpipe"), "profile", "device", str(package), "--flash", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(done.stderr.strip())
    flash = json.loads(done.stdout)["flash"]
    for read in flash["reads"]:
        place = read["request_bytes"], read["depth"], read["range_bytes"], read["sequential"], read["core"]
        if place == (8192, 32, flash["file_bytes"], False, None):
            return float(read["bytes_per_s"]["median"]) / 1e6
    raise UserError("the profile has no reads of 8 KiB")


# ---- all of it -----------------------------------------------------------------------------------------------
def measure(package: Path, file: Path, keys: list[CellKey], *, refresh: bool = False) -> None:
    """Measure the cells that the file does not have.

    refresh: measure flash before and after each cell that reads it, so that its row shows how the disk changed.
    """
    lines = read_lines(file)
    before: float | None = None
    for number, key in enumerate(keys, 1):
        if done_cell(lines, key) is not None:
            continue
        words = bench_words(key)
        print(f"{number} of {len(keys)}: {' '.join(words)} ...", file=sys.stderr, flush=True)
        reads = refresh and key["resident"] < 100
        if reads and before is None:
            before = measured_flash_mb_per_s(package)
        result = bench(package, words)
        if reads and before is not None and not isinstance(result, str):
            after = measured_flash_mb_per_s(package)
            result[0]["flash_mb_per_s"] = [before, after]
            before = after
        line = add_line(file, key, result)
        if line["refused"] is not None:
            print(f"refused: {line['refused']}", file=sys.stderr)


def main() -> None:
    """Measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("package", nargs="?", type=Path, default=DEMO, help="package directory (default: the demo)")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="JSON lines (default: planned-PACKAGE.jsonl)")
    parser.add_argument(
        "--subset", type=parse_subset, default={}, metavar="LIST", help="resident=50+75,mode=exact,workers=2,batch=1"
    )
    parser.add_argument("--tests", default="tg128", metavar="TEST", help="one (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--context", type=int, metavar="TOKENS", help="(default: the package's)")
    parser.add_argument("--workload", metavar="PRESET", help="of a synthetic package (default: its default)")
    parser.add_argument(
        "--refresh-flash", action="store_true", help="measure flash before each cell; the profile must be there"
    )
    parser.add_argument("--table", action="store_true", help="print what the file has and measure nothing")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends the `bench` under way as well
    try:
        manifest = Package.open(arguments.package).manifest
        file = arguments.rows or Path(f"planned-{arguments.package.resolve().name}.jsonl")
        shared = {name: getattr(arguments, name) for name in ("tests", "repetitions", "context", "workload")}
        grid = cells(arguments.subset, predictor=manifest.predictor is not None)
        keys = [{**cell, **shared, "package": manifest.id} for cell in grid]
        try:
            if not arguments.table:
                measure(arguments.package, file, keys, refresh=arguments.refresh_flash)
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from here", file=sys.stderr)
        lines = read_lines(file)
        print(markdown(line for line in lines if arguments.table or line["asked"] in keys), end="")
    except UserError as error:
        sys.exit(f"planned.py: {error}")


if __name__ == "__main__":
    main()
