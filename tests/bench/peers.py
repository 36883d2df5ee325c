"""llama.cpp on the GGUF counterpart of a shape, and the limits of this machine's memory and disk.

    python tests/bench/peers.py --llama DIR --gguf FILE [--parts memory,prefill,limited,disk] [--limit BYTES] [--json]

DIR holds a built llama.cpp (see README.md), FILE is a GGUF file such as `neuronpipe synth --gguf` writes. Nothing else
may run meanwhile. It asserts nothing but that memory limits hold.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

import disk
import dram
import llama
from neuronpipe.launch.arguments.values import parse_bytes
from neuronpipe.native import ffi, lib

PARTS = ("memory", "prefill", "limited", "disk")
GB = 1e9
LIMITED_PROMPT_TOKENS = 128
LIMIT_BYTES = 2_600_000_000  # about half of the feed-forward weights of a 7B do not fit


def machine() -> dict[str, Any]:
    """Describe the machine without its name."""
    return {
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_sets": ffi.string(lib.np_isa_names()).decode(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release().split("-")[0],
    }


def measure(
    parts: list[str], program: Path, gguf: Path, *, limits_bytes: list[int], tokens: int, repeats: int
) -> dict[str, Any]:
    """Measure the requested parts, in an order that keeps comparable figures close in time.

    tokens, repeats: of the runs under a limit.
    """
    report: dict[str, Any] = {"date": datetime.date.today().isoformat(), "machine": machine()}
    if "memory" in parts:
        report["dram"] = dram.measure(rounds=5)
        report["decode"] = llama.in_memory(program, gguf, prompt_tokens=[], tokens=64, repeats=5)
    if "prefill" in parts:
        report["prefill"] = [
            *llama.in_memory(program, gguf, prompt_tokens=[128], tokens=0, repeats=3),
            *llama.in_memory(program, gguf, prompt_tokens=[512], tokens=0, repeats=3),
        ]
    if "limited" in parts:
        report["limited"] = [
            llama.under_limit(
                program, gguf, limit_bytes=limit_bytes, prompt_tokens=prompt_tokens, tokens=tokens, repeats=repeats
            )
            for limit_bytes in limits_bytes
            for prompt_tokens in (LIMITED_PROMPT_TOKENS, 0)
        ]
    if "disk" in parts:
        report["disk"] = disk.measure(gguf, rounds=3, point_s=1)
    return report


def tables(report: dict[str, Any]) -> str:
    """Return the figures as Markdown tables."""
    kind = report["machine"]
    lines = [
        f"{report['date']}: {kind['cores']} {kind['processor']} cores ({kind['instruction_sets']}), "
        f"{kind['memory_bytes'] / 2**30:.0f} GiB, Linux {kind['kernel']}"
    ]
    if rows := [row for part in ("decode", "prefill", "limited") for row in report.get(part, [])]:
        lines += [
            "",
            "| llama.cpp | tokens/s, median (range) | seconds | repack | limit | disk bytes per token |",
            "|---|---|---|---|---|---|",
        ]
    for row in rows:
        limit = f"{row['limit_bytes'] / GB:.1f} GB, peak {row['peak_bytes'] / GB:.2f}" if "limit_bytes" in row else "-"
        flash = f"{row['disk_bytes_per_token'] / GB:.2f} GB" if "limit_bytes" in row else "-"
        spread = f"{row['tokens_per_s_least']:.3g}-{row['tokens_per_s_most']:.3g}"
        repack = "on" if row["repack"] else "off"
        rate = f"{row['tokens_per_s']:.3g} ({spread})"
        lines.append(f"| {row['test']} | {rate} | {row['seconds']:.3g} | {repack} | {limit} | {flash} |")
    if "dram" in report:
        lines += ["", *dram_table(report["dram"])]
    if "disk" in report:
        lines += ["", "| KiB | depth | fio MB/s | reader MB/s | ratio |", "|---|---|---|---|---|"]
    for row in report.get("disk", []):
        rates = f"{row['fio_bytes_per_s'] / 1e6:.0f} | {row['reader_bytes_per_s'] / 1e6:.0f}"
        lines.append(f"| {row['request_bytes'] // 1024} | {row['depth']} | {rates} | {row['ratio']:.2f} |")
    return "\n".join(lines)


def dram_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line per piece size and a column per mapping and threads: GB/s without and with prefetch."""
    cells: dict[int, dict[tuple[str, int], list[str]]] = {}
    for row in rows:
        line = cells.setdefault(row["piece_bytes"], {})
        line.setdefault((row["mapping"], row["threads"]), []).append(f"{row['bytes_per_s'] / GB:.1f}")
    columns = [(mapping, threads) for mapping in dram.MAPPINGS for threads in (1, 2)]
    heads = " | ".join(f"{mapping}, {threads} threads" for mapping, threads in columns)
    lines = [f"| DRAM, GB/s with prefetch of 0 / 1 / 2 / 4 pieces | {heads} |", "|---" * (len(columns) + 1) + "|"]
    for piece, line in cells.items():
        name = f"{piece} bytes, one piece in ten" if piece else "sequential"
        lines.append(f"| {name} | " + " | ".join(" / ".join(line[column]) for column in columns) + " |")
    return lines


def main() -> None:
    """Measure the parts and print tables or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--llama", type=Path, required=True, help="build directory of llama.cpp")
    parser.add_argument(
        "--gguf", "--twin", type=Path, required=True, help="GGUF file; also the file that disk reads fall on"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=f"which of {', '.join(PARTS)} (default: all)")
    parser.add_argument(
        "--limit",
        type=parse_bytes,
        action="append",
        metavar="BYTES",
        help="memory limit of the part `limited`, e.g. 7GB or 16GiB; may be given again (default: 2.6GB)",
    )
    parser.add_argument("--tokens", type=int, default=12, help="that are decoded under a limit (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of each test under a limit (default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts: {unknown[0]!r} is none of {', '.join(PARTS)}")
    report = measure(
        parts,
        options.llama / "bin" / "llama-bench",
        options.gguf,
        limits_bytes=options.limit or [LIMIT_BYTES],
        tokens=options.tokens,
        repeats=options.repeats,
    )
    print(json.dumps(report, indent=1) if options.json else tables(report))


if __name__ == "__main__":
    main()
