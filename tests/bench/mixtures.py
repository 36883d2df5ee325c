"""Mixtures under a memory limit, engine beside engine, with the bound of each row measured beside the run.

    python -m tests.bench.mixtures [--shapes A,B] [--limits 8GB,4GB] [--rounds 3] [--folder DIR] [--llama DIR] [--table]

Each round measures every engine once, in turns, and appends a row to FOLDER/mixtures.jsonl. Started again, the command
measures what is missing. `--table` prints the medians and measures nothing. Packages and GGUF files that FOLDER lacks
are synthesized there, and removed after their rows with --remove. Routers repeat their choices as
plans/lab/synth/routing.py states for each family. Nothing else may run meanwhile.

The bound of a row: tokens/s = 1 / max(bytes of DRAM / speed of DRAM, bytes of flash / speed of flash), of the bytes
that the run counted. Both speeds are the larger of two measurements right after the run: flash by direct reads of the
same file, of the run's mean size; DRAM by as many processes as the run has workers. A fraction above 1 is printed as
such: it means that the machine's speed changed meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from neuronpipe.launch.arguments.values import parse_bytes
from neuronpipe.launch.formats import show_bytes
from neuronpipe.plans.device.measured_points import SEQUENTIAL_PIECE_BYTES
from neuronpipe.plans.measure.memory_bandwidth import measure_dram
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError

from tests.bench import disk, llama
from tests.bench.ablations import bench
from tests.bench.planned import Row, add_line, done_cell, read_lines, table_line

GB = 10**9
READ_BYTES = 1 << 20  # of the disk's measurement where a run read nothing
SPEED_ROUNDS = 2  # measurements of the machine's speeds after a run
MOST_IN_FLIGHT_BYTES = 64 << 20
CONTEXT_TOKENS = 2048
LLAMA_TOKENS = 8  # that llama.cpp decodes: a mapped mixture takes seconds for each


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape under its memory limits.

    targets: tokens/s to be reached, by limit in GB; 0 where only the bound is the target
    """

    shape: str
    targets: dict[float, float]
    mode: str = "exact"


CASES = (
    Case("qwen3-30b-a3b", {8: 12, 4: 7, 3: 6}),
    Case("qwen3.6-35b-a3b", {8: 0, 4: 0}),
    Case("gpt-oss-20b", {8: 0}),
    Case("gemma-4-26b-a4b", {8: 0, 4: 0}),
    Case("glm-4.7-flash", {8: 0, 4: 0}),
    Case("smallthinker-4b", {1: 0}),
    Case("smallthinker-21b", {8: 16, 4: 9}),
    Case("turbosparse-mixtral-47b", {19: 12, 16: 10.5, 10: 6.5, 7: 4.5}, mode="predicted"),
)


# ---- bounds --------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Speeds:
    """What the machine gave right after a run, in bytes per second."""

    dram_bytes_per_s: float
    flash_bytes_per_s: float


def measured_speeds(bundles: Path, *, read_bytes: int, workers: int) -> Speeds:
    """Measure DRAM with this number of processes, and flash by reads of `read_bytes`."""
    size_bytes = min(max(-(-read_bytes // 4096) * 4096, 4096), 8 << 20)
    depth = max(4, min(32, MOST_IN_FLIGHT_BYTES // size_bytes))
    available_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    points = measure_dram([None] * workers, available_bytes, rounds=1, budget_s=0.3, counts=[workers])
    if not points:
        raise UserError("too little memory is free to measure its speed")
    flash = disk.reader_bytes_per_s(bundles, size_bytes, depth, seconds=1)
    sequential = next(point for point in points if point.piece_bytes == SEQUENTIAL_PIECE_BYTES)
    return Speeds(sequential.bytes_per_s.median, flash)


def bound(row: Row, speeds: Sequence[Speeds]) -> tuple[float, str]:
    """Return the tokens/s that the bytes of a row allow, and which of the two binds: `DRAM` or `flash`."""
    dram_s = row["dram_bytes_per_token"] / max(one.dram_bytes_per_s for one in speeds)
    flash_s = row["flash_bytes_per_token"] / max(one.flash_bytes_per_s for one in speeds)
    return 1 / max(dram_s, flash_s), "flash" if flash_s > dram_s else "DRAM"


# ---- engines -------------------------------------------------------------------------------------------------
def measure_ours(package: Path, case: Case, limit_bytes: int) -> list[Row] | str:
    """Return one row of decoding and of a prompt, with the bound, or the line of a refusal."""
    bundles = Package.open(package).bundles_path
    words = ("--memory", str(limit_bytes), "--context", str(CONTEXT_TOKENS), "--mode", case.mode)
    rows = bench(package, (*words, "--tests", "pp512,tg96", "--repetitions", "1"))
    if isinstance(rows, str):
        return rows
    prompt, decode = rows
    reads = decode["flash_reads_per_token"]
    read_bytes = int(decode["flash_bytes_per_token"] / reads) if reads else READ_BYTES
    speeds = [measured_speeds(bundles, read_bytes=read_bytes, workers=decode["workers"]) for _ in range(SPEED_ROUNDS)]
    tokens_per_s, binding = bound(decode, speeds)
    return [
        {
            **decode,
            "prompt_tokens_per_s": prompt["prefill_tokens_per_s"],
            "bound_tokens_per_s": tokens_per_s,
            "binding": binding,
            "dram_bytes_per_s": [one.dram_bytes_per_s for one in speeds],
            "flash_bytes_per_s": [one.flash_bytes_per_s for one in speeds],
        }
    ]


def measure_llama(program: Path, gguf: Path, limit_bytes: int) -> list[Row] | str:
    """Return llama.cpp's row with the file mapped, under the same limit from outside."""
    try:
        row = llama.under_limit(program, gguf, limit_bytes=limit_bytes, prompt_tokens=0, tokens=LLAMA_TOKENS, repeats=1)
    except SystemExit as error:
        return str(error)
    return [{**row, "flash_bytes_per_token": row["disk_bytes_per_token"], "peak_memory_bytes": row["peak_bytes"]}]


# ---- files ---------------------------------------------------------------------------------------------------
def synthesized(shape: str, path: Path, *, gguf: bool = False) -> Path:
    """Return the package or the GGUF file of a shape, made if it is not there. Raises UserError."""
    if not path.exists():
        words = ["synth", shape, "--gguf" if gguf else "-o", str(path)]
        print(f"{shape}: making {path} ...", file=sys.stderr, flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "neuronpipe.launch", *words, "--json"], capture_output=True, text=True
        )
        if done.returncode:
            raise UserError((done.stderr.strip().splitlines() or [f"synth {shape} failed"])[-1])
        os.sync()  # else the first round would read while these files are being written
    return path


def remove(path: Path) -> None:
    """Remove a package or a file."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ---- all of it -----------------------------------------------------------------------------------------------
def measure(
    cases: Iterable[Case], limits_gb: Sequence[float], *, rounds: int, folder: Path, program: Path | None, clean: bool
) -> None:
    """Measure what FOLDER/mixtures.jsonl lacks.

    limits_gb: only these limits; all if it is empty
    program: llama-bench, if llama.cpp is measured too
    clean: remove the packages and GGUF files that were made here
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "mixtures.jsonl"
    for case in cases:
        limits = [limit for limit in case.targets if not limits_gb or limit in limits_gb]
        keys = [
            {"shape": case.shape, "limit_gb": limit, "mode": case.mode, "engine": engine, "round": number}
            for limit in limits
            for number in range(rounds)
            for engine in ("neuronpipe", *(["llama.cpp"] if program else []))
        ]
        lines = read_lines(rows)
        missing = [key for key in keys if done_cell(lines, key) is None]
        package, gguf = folder / case.shape, folder / f"{case.shape}.gguf"
        before = {path for path in (package, gguf) if path.exists()}
        for key in missing:
            print(f"{case.shape}, {key['limit_gb']:g} GB, {key['engine']} ...", file=sys.stderr, flush=True)
            limit_bytes = int(key["limit_gb"] * GB)
            if key["engine"] == "neuronpipe":
                result = measure_ours(synthesized(case.shape, package), case, limit_bytes)
            else:
                assert program is not None
                result = measure_llama(program, synthesized(case.shape, gguf, gguf=True), limit_bytes)
            line = add_line(rows, key, result)
            if line["refused"]:
                print(f"refused: {line['refused']}", file=sys.stderr)
        if clean:
            for path in {package, gguf} - before:
                remove(path)


HEADS = (
    "shape, limit",
    "engine",
    "tokens/s (range)",
    "target",
    "bound, binds",
    "of the bound",
    "flash a token",
    "misses",
    "p99 / p50",
    "prompt of 512",
    "peak",
)


def markdown(lines: Iterable[Row]) -> str:
    """Return the table: medians over rounds, a row for each shape, limit and engine."""
    groups: dict[tuple[str, float, str], list[Row]] = {}
    for line in lines:
        key = line["asked"]
        groups.setdefault((key["shape"], -key["limit_gb"], key["engine"]), [])
        if line["row"] is not None:
            groups[key["shape"], -key["limit_gb"], key["engine"]].append(line["row"])
    order = [case.shape for case in CASES]
    targets = {case.shape: case.targets for case in CASES}
    text = [table_line(HEADS), "|---" * len(HEADS) + "|"]
    for (shape, limit, engine), rows in sorted(
        groups.items(), key=lambda item: (order.index(item[0][0]), *item[0][1:])
    ):
        target = targets[shape].get(-limit, 0) if engine == "neuronpipe" else 0
        cells = [f"{shape}, {-limit:g} GB", engine, *(_cells(rows) if rows else ["refused", *["-"] * 7])]
        cells.insert(3, f"{target:g}" if target else "-")
        text.append(table_line(cells))
    return "\n".join(text) + "\n"


def _cells(rows: Sequence[Row]) -> list[str]:
    def median(name: str) -> float | None:
        values = [row[name] for row in rows if row.get(name) is not None]
        return statistics.median(values) if values else None

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    rates = [row["tokens_per_s"] for row in rows]
    bounds = [row for row in rows if "bound_tokens_per_s" in row]
    fractions = [row["tokens_per_s"] / row["bound_tokens_per_s"] for row in bounds]
    spreads = [row["tbt_ms"]["p99"] / row["tbt_ms"]["p50"] for row in rows if row.get("tbt_ms")]
    flash, peak = median("flash_bytes_per_token"), median("peak_memory_bytes")
    return [
        f"{statistics.median(rates):.3g} ({min(rates):.3g} to {max(rates):.3g})",
        f"{shown(median('bound_tokens_per_s'), '{:.3g}')}, {bounds[0]['binding']}" if bounds else "-",
        shown(statistics.median(fractions) if fractions else None, "{:.0%}"),
        "-" if flash is None else show_bytes(int(flash)),
        shown(median("miss_rate"), "{:.1%}"),
        shown(statistics.median(spreads) if spreads else None, "{:.2f}"),
        shown(median("prompt_tokens_per_s"), "{:.3g}"),
        "-" if peak is None else show_bytes(int(peak)),
    ]


def parsed_limits(text: str) -> list[float]:
    """Return limits in GB of a text such as `8GB,4GB`."""
    return [parse_bytes(word) / GB for word in text.split(",")]


def main() -> None:
    """Measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shapes", metavar="LIST", help=f"of {', '.join(case.shape for case in CASES)} (default: all)")
    parser.add_argument(
        "--limits", type=parsed_limits, default=[], metavar="LIST", help="only these of a shape's limits"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, default=Path("mixtures"), help="packages and rows (default: %(default)s)"
    )
    parser.add_argument("--llama", type=Path, metavar="DIR", help="build directory of llama.cpp, to measure it too")
    parser.add_argument("--remove", action="store_true", help="remove each package that was made, after its rows")
    parser.add_argument("--table", action="store_true", help="print what the folder has and measure nothing")
    arguments = parser.parse_args()
    chosen: Any = arguments.shapes.split(",") if arguments.shapes else [case.shape for case in CASES]
    if unknown := set(chosen) - {case.shape for case in CASES}:
        parser.error(f"--shapes: {min(unknown)!r} is none of {', '.join(case.shape for case in CASES)}")
    cases = [case for case in CASES if case.shape in chosen]
    began = time.monotonic()
    try:
        if not arguments.table:
            program = arguments.llama / "bin" / "llama-bench" if arguments.llama else None
            measure(
                cases,
                arguments.limits,
                rounds=arguments.rounds,
                folder=arguments.folder,
                program=program,
                clean=arguments.remove,
            )
            print(f"measured for {time.monotonic() - began:.0f} s", file=sys.stderr)
        lines = read_lines(arguments.folder / "mixtures.jsonl")
        print(markdown(line for line in lines if line["asked"]["shape"] in chosen), end="")
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
    except UserError as error:
        sys.exit(f"mixtures.py: {error}")


if __name__ == "__main__":
    main()
