"""Planned speeds on machines with more cores and faster flash, with what limits each.

    python -m tests.bench.scaling [--cores 2,8,16] [--flash 1,7]

Each cell is the plan of `neuronpipe plan SHAPE --device FILE` for a described machine. Its cores are those of this
file's constants; so is its flash, of which the larger of two speeds counts: bytes or reads per second. Beside the
planned tokens/s stand the work of the loader's thread and of the cache manager at that speed, as shares of a second:
costs that no plan for a described machine contains. A share above 1 means that this process limits the speed. A read
counts as one slot for the cache manager, though with clusters of a few neurons it may bring many.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench.planned import table_line

CONTEXT_TOKENS = 2048
CORE_GB_PER_S, COMPUTES_GB_PER_S = 12.3, 27  # of one core: reading DRAM, and computing with weights in the cache
BARRIER_US, MESSAGE_US, LOOKUP_NS = 5, 190, 100
READS_PER_S = 100_000  # of the smallest size
# Processor time of the loader: of a small read on the cores that compute (results, 2026-11-23), and with whole experts
# 21.7 % of a core at 0.5 GB/s (Xeon 6, beside two workers, 2026-11-29).
LOADER_US_PER_READ, LOADER_GB_PER_S = 12, 2.4
GRANT_US = 600  # of the cache manager for a message of the loader and its answer, which come for a quarter of the stock


class Shape(NamedTuple):
    """A shape under its memory limit in GB."""

    name: str
    limit_gb: float
    mode: str = "exact"


SHAPES = (
    Shape("qwen3-30b-a3b", 8),
    Shape("qwen3.6-35b-a3b", 8),
    Shape("gpt-oss-120b", 16),
    Shape("smallthinker-21b", 4),
    Shape("turbosparse-mixtral-47b", 10, "predicted"),
)


def description(cores: int, flash_gb_per_s: float) -> dict[str, Any]:
    """Return a device file of a machine with equal cores."""

    def assumed(value: float) -> dict[str, Any]:
        return {"value": value, "source": "assumed: constants of tests/bench/scaling.py"}

    dram, smallest = cores * CORE_GB_PER_S, min(READS_PER_S * 4096 / 1e9, flash_gb_per_s)
    curve = {
        "points": [{"block_kib": 4, "gb_per_s": smallest}, {"block_kib": 512, "gb_per_s": flash_gb_per_s}],
        "source": "assumed",
    }
    one_class = {"kind": "big", "count": cores, "reads_gb_per_s": CORE_GB_PER_S}
    return {
        "name": f"{cores} cores, {flash_gb_per_s:g} GB/s",
        "memory_usable_gb": assumed(128),
        "cores": [one_class | {"computes_gb_per_s": COMPUTES_GB_PER_S, "source": "assumed"}],
        "dram_cpu_gb_per_s": assumed(dram),
        "dram_npu_gb_per_s": assumed(0),
        "dram_total_gb_per_s": assumed(dram),
        "npu_tflop_per_s": assumed(0),
        "npu_start_us": assumed(0),
        "copy_gb_per_s": assumed(CORE_GB_PER_S),
        "barrier_us": assumed(BARRIER_US),
        "message_us": assumed(MESSAGE_US),
        "lookup_ns": assumed(LOOKUP_NS),
        "flash_sequential": curve,
        "flash_random": curve,
        "flash_ranges": {"points": [{"range_mib": 128, "share": 1.0}], "source": "assumed"},
        "flash_issuers": {"big": 1.0, "mid": 1.0, "little": 1.0, "several": 1.0, "source": "assumed"},
    }


def plan_of(shape: Shape, device: Path) -> dict[str, Any]:
    """Return the plan for a shape as `plan --json` prints it. Raises CalledProcessError."""
    words = ["plan", shape.name, "--device", str(device), "--memory", f"{shape.limit_gb:g}GB", "--mode", shape.mode]
    command = [sys.executable, "-m", "neuronpipe.launch", *words, "--context", str(CONTEXT_TOKENS), "--json"]
    result: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def cells(plan: dict[str, Any]) -> list[str]:
    """Return the planned speed, what limits it, and the shares of a second of the loader and the cache manager."""
    expected, slots_per_grant = plan["expected"], plan["flash"]["reserved_values"] // 4 + 1
    speed, reads = expected["tokens_per_s"], expected["flash_reads_per_token"]
    flash_bytes = expected["flash_bytes_per_token"]
    times_ms = {
        "DRAM": expected["sequential_ms_per_token"] + expected["neuron_ms_per_token"],
        "flash": expected["flash_ms_per_token"],
        "messages, barriers": expected["overhead_ms_per_token"],
    }
    loader = speed * (reads * LOADER_US_PER_READ / 1e6 + flash_bytes / (LOADER_GB_PER_S * 1e9))
    cache = speed * reads / slots_per_grant * GRANT_US / 1e6
    return [
        f"{speed:.1f}",
        max(times_ms, key=lambda name: times_ms[name]),
        f"{speed * flash_bytes / 1e9:.2f} GB, {speed * reads:,.0f} reads",
        f"{loader:.2f}",
        f"{cache:.2f}",
    ]


HEADS = ("shape, limit", "cores", "flash", "tokens/s", "limited by", "flash a second", "loader", "cache manager")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cores", default="2,8,16", metavar="LIST", help="(default: %(default)s)")
    parser.add_argument("--flash", default="1,7", metavar="LIST", help="in GB/s (default: %(default)s)")
    arguments = parser.parse_args()
    print(table_line(HEADS), "|---" * len(HEADS) + "|", sep="\n")
    with tempfile.TemporaryDirectory() as folder:
        device = Path(folder) / "device.json"
        for shape in SHAPES:
            for cores in map(int, arguments.cores.split(",")):
                for flash in map(float, arguments.flash.split(",")):
                    device.write_text(json.dumps(description(cores, flash)))
                    row = (f"{shape.name}, {shape.limit_gb:g} GB", str(cores), f"{flash:g} GB/s")
                    row += tuple(cells(plan_of(shape, device)))
                    print(table_line(row), flush=True)


if __name__ == "__main__":
    main()
