"""Planned beside measured, over a grid: `neuronpipe bench` with 40, 50, 60, 75 and 100 % resident, exact and predicted,
one and two workers, one text and four at once.

    python tests/bench/planned.py [PACKAGE] [--rows FILE.jsonl] [--subset resident=50,mode=predicted] [--tests tg128]

Each cell is a `bench` of its own, and a line of the file as soon as it is measured. Started again with the same file,
package and options it measures what is missing, so it may be interrupted at any time. --table prints what the file has
and measures nothing. Not a test: it asserts nothing. Nothing else may run meanwhile.
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
Asked = dict[str, Any]
"""What makes a line the answer to a cell: the cell, the package and how it was measured."""

GRID: dict[str, tuple[Any, ...]] = {
    "batch": (1, 4),
    "workers": (2, 1),
    "mode": ("predicted", "exact"),
    "resident": (50, 100, 75, 60, 40),  # percent, in the order in which they tell most
}


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A column of the table. target: what error is within the target."""

    name: str
    title: str
    show: Callable[[float], str]
    target: Callable[[float], bool]
    target_text: str


QUANTITIES = (
    Quantity("tokens_per_s", "tokens/s", show_number, lambda e: abs(e) <= 0.1, "within 10 %"),
    Quantity("miss_rate", "misses", "{:.1%}".format, lambda e: abs(e) <= 0.15, "within 15 %"),
    Quantity("flash_bytes_per_token", "flash a token", show_bytes, lambda e: abs(e) <= 0.15, "within 15 %"),
    # A limit that is kept by chance is none: no more may be measured than was planned.
    Quantity(
        "peak_memory_bytes", "peak memory", show_bytes, lambda e: 0 <= e <= 0.03, "within 3 % and never above the plan"
    ),
)


# ---- cells ---------------------------------------------------------------------------------------------------
def cells(subset: dict[str, tuple[str, ...]], *, predictor: bool) -> list[Row]:
    """Those of the grid that the subset names, in the order of measuring. Predicted mode needs a predictor."""
    found: list[Row] = [{}]
    for name, values in GRID.items():
        wanted = [value for value in values if name not in subset or str(value) in subset[name]]
        found = [{**cell, name: value} for cell in found for value in wanted]
    return [cell for cell in found if predictor or cell["mode"] != "predicted"]


def parse_subset(text: str) -> dict[str, tuple[str, ...]]:
    """`resident=50+75,mode=exact`. For argparse: raises ArgumentTypeError."""
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


def words_of(asked: Asked) -> tuple[str, ...]:
    """What a cell adds to `neuronpipe bench PACKAGE`."""
    words = ["--ffn-resident", f"{asked['resident']}%", "--mode", asked["mode"]]
    for name in ("workers", "batch", "tests", "repetitions", "context", "workload"):
        if asked[name] is not None:
            words += [f"--{name}", str(asked[name])]
    return tuple(words)


# ---- the file ------------------------------------------------------------------------------------------------
def read_lines(file: Path) -> list[Row]:
    """The lines of an earlier run. The last one may be cut off, where it was interrupted: it is left out. Raises
    UserError naming another that is none."""
    if not file.exists():
        return []
    found = []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            found.append({"asked": dict(line["asked"]), "row": line["row"], "refused": line["refused"]})
        except (ValueError, KeyError, TypeError):
            if number == len(lines) and not text.endswith("\n"):
                return found
            raise UserError(f"{file}: line {number}: not a line that this program wrote; take another --rows") from None
    return found


def add_line(file: Path, asked: Asked, result: list[Row] | str) -> Row:
    """Append one cell's outcome, whole or not at all."""
    row, refused = (None, result) if isinstance(result, str) else (result[0], None)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    kept = file.read_bytes() if file.exists() else b""
    if kept and not kept.endswith(b"\n"):  # a line that was cut off
        file.write_bytes(kept[: kept.rfind(b"\n") + 1])
    line = {"asked": asked, "row": row, "refused": refused, "measured_at": now}
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(line) + "\n")
    return line


def done_cell(lines: Iterable[Row], asked: Asked) -> Row | None:
    """The last line that answers this; a refusal is asked again, it may have been a mishap."""
    answers = [line for line in lines if line["asked"] == asked and line["row"] is not None]
    return answers[-1] if answers else None


# ---- the table -----------------------------------------------------------------------------------------------
def markdown(lines: Iterable[Row]) -> str:
    """Planned / measured and the error of every cell that is there, in the grid's natural order, and how many errors
    are within the target."""
    last = {json.dumps(line["asked"], sort_keys=True): line for line in lines}
    ordered = sorted(
        last.values(), key=lambda line: [line["asked"][name] for name in ("mode", "workers", "batch", "resident")]
    )
    heads = ["resident", "mode", "workers", "texts", "disk, MB/s before, after"]
    for quantity in QUANTITIES:
        heads += [f"{quantity.title}, planned / measured", "error"]
    shown = [table_line(heads), "|---" * len(heads) + "|"]
    for line in ordered:
        asked, row = line["asked"], line["row"]
        cell = [f"{asked['resident']} %", asked["mode"], str(asked["workers"]), str(asked["batch"])]
        cell.append(", ".join(f"{speed:.0f}" for speed in (row or {}).get("flash_mb_per_s", ())) or "-")
        for quantity in QUANTITIES:
            cell += ["refused", "-"] if row is None else _figures(quantity, row)
        shown.append(table_line(cell))
    rows = [line["row"] for line in ordered if line["row"] is not None]
    shown += ["", *(_summary(quantity, rows) for quantity in QUANTITIES)]
    refused = [line for line in ordered if line["row"] is None]
    shown += [f"- refused: {' '.join(words_of(line['asked']))}: {line['refused']}" for line in refused]
    return "\n".join(shown) + "\n"


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
    """Measure flash again, for the plans that follow; the speed of random reads of 8 KiB, 32 under way."""
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
def measure(package: Path, file: Path, wanted: list[Asked], *, refresh: bool = False) -> None:
    """What of these cells the file does not have yet. refresh: flash is measured before each cell that reads it, and
    after, so that its row says how much the disk changed meanwhile."""
    lines = read_lines(file)
    before: float | None = None
    for number, asked in enumerate(wanted, 1):
        if done_cell(lines, asked) is not None:
            continue
        words = words_of(asked)
        print(f"{number} of {len(wanted)}: {' '.join(words)} ...", file=sys.stderr, flush=True)
        reads = refresh and asked["resident"] < 100
        if reads and before is None:
            before = measured_flash_mb_per_s(package)
        result = bench(package, words)
        if reads and before is not None and not isinstance(result, str):
            after = measured_flash_mb_per_s(package)
            result[0]["flash_mb_per_s"] = [before, after]
            before = after
        line = add_line(file, asked, result)
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
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends the `bench` under way as well
    try:
        manifest = Package.open(given.package).manifest
        file = given.rows or Path(f"planned-{given.package.resolve().name}.jsonl")
        shared = {name: getattr(given, name) for name in ("tests", "repetitions", "context", "workload")}
        found = cells(given.subset, predictor=manifest.predictor is not None)
        wanted = [{**cell, **shared, "package": manifest.id} for cell in found]
        try:
            if not given.table:
                measure(given.package, file, wanted, refresh=given.refresh_flash)
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from here", file=sys.stderr)
        lines = read_lines(file)
        print(markdown(line for line in lines if given.table or line["asked"] in wanted), end="")
    except UserError as error:
        sys.exit(f"planned.py: {error}")


if __name__ == "__main__":
    main()
