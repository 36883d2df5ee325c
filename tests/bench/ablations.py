"""Ablations: `neuronpipe bench` without some techniques, and for every preset of a workload.

    python tests/bench/ablations.py [PACKAGE] [--ffn-resident 50%] [--tests tg128] [--repetitions 3] [--json]

Rows are in the order of PowerInfer-2's Figure 14: a baseline without any technique, then one more at a time; then all
but one, a baseline like "LLM in a flash" made of our own parts, and everything in memory. A case that cannot be planned
is printed with the reason. Not a test: it asserts nothing. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from neuronpipe.launch.bench.report import table
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.package.reader import Package

COMMAND = (sys.executable, "-m", "neuronpipe.launch", "bench")
ADDED = (
    "bundle",
    "cache",
    "pipeline",
    "predictor",
    "prefetch",
)  # in the order of adding; exact mode until the predictor


def cases() -> dict[str, tuple[str, ...]]:
    """Return the options of `bench` for each case, in addition to the residency."""
    words_by_case = {}
    for count in range(len(ADDED) + 1):
        name = "none of them" if count == 0 else f"+ {ADDED[count - 1]}"
        words_by_case[name] = _without(ADDED[count:])
    for technique in ADDED:
        words_by_case[f"all but {technique}"] = _without((technique,))
    words_by_case["as LLM in a flash"] = ("--baseline", "llm-in-a-flash")
    words_by_case["exact mode"] = ("--mode", "exact")
    words_by_case["all in memory"] = ("--mode", "predicted", "--ffn-resident", "100%")
    return words_by_case


def _without(techniques: tuple[str, ...]) -> tuple[str, ...]:
    mode = ("--mode", "predicted")
    return (*mode, "--without", ",".join(techniques)) if techniques else mode


def bench(package: Path, words: tuple[str, ...]) -> list[dict[str, Any]] | str:
    """Return the rows of one `bench` command, or the line of its error."""
    done = subprocess.run([*COMMAND, str(package), *words, "--json"], capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"exit status {done.returncode}"
    return list(json.loads(done.stdout))


def line(name: str, preset: str | None, row: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of one row of the printed table."""
    times = row["tbt_ms"]
    ratio = f"{times['p99'] / times['p50']:.2f}" if times["p50"] else "-"
    fraction = row["dram_limit_fraction"]
    return (
        name,
        preset or "-",
        row["test"],
        f"{row['tokens_per_s']:.2f}",
        f"{row['flash_bytes_per_token'] / 1e6:.2f}",
        f"{row['miss_rate']:.1%}",
        f"{row['exposed_io_share']:.0%}",
        f"{row['coordination_share']:.1%}",
        "-" if fraction is None else f"{fraction:.0%}",
        ratio,
    )


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("package", nargs="?", type=Path, default=DEMO, help="package directory (default: the demo)")
    parser.add_argument("--ffn-resident", default="50%", metavar="SHARE", help="(default: %(default)s)")
    parser.add_argument("--tests", default="tg128", metavar="LIST", help="(default: %(default)s)")
    parser.add_argument("--repetitions", default="3", metavar="N", help="(default: %(default)s)")
    parser.add_argument("--cases", metavar="LIST", help="names of cases, with commas between (default: all)")
    parser.add_argument("--presets", metavar="LIST", help="of the workload (default: all)")
    parser.add_argument("--json", action="store_true", help="print the rows with their case instead")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends the `bench` under way as well
    workload = Package.open(arguments.package).manifest.workload
    presets: list[str | None] = list(workload.presets) if workload else [None]
    if arguments.presets:
        presets = arguments.presets.split(",")
    chosen = {
        name: words for name, words in cases().items() if not arguments.cases or name in arguments.cases.split(",")
    }
    if not chosen:
        parser.error(f"--cases {arguments.cases}: choose from {', '.join(cases())}")
    rows, refused, lines = [], [], []
    for preset in presets:
        for name, words in chosen.items():
            print(f"{preset or 'demo text'}: {name} ...", file=sys.stderr, flush=True)
            shared = (
                "--ffn-resident",
                arguments.ffn_resident,
                "--tests",
                arguments.tests,
                "--repetitions",
                arguments.repetitions,
            )
            if preset is not None:
                shared += ("--workload", preset)
            result = bench(arguments.package, (*shared, *words))
            if isinstance(result, str):
                refused.append({"case": name, "workload": preset, "refused": result})
                lines.append((name, preset or "-", "refused", *["-"] * 7))
                continue
            rows += [{"case": name, **row} for row in result]
            lines += [line(name, preset, row) for row in result]
    if arguments.json:
        print(json.dumps(rows + refused, indent=1))
        return
    heads = ("case", "workload", "test", "tokens/s", "flash MB", "missed", "exposed I/O", "coordination")
    print(table((*heads, "of memory", "TBT p99/p50"), lines))
    for refusal in refused:
        print(f"{refusal['case']}, {refusal['workload'] or 'demo text'}: {refusal['refused']}")


if __name__ == "__main__":
    main()
