"""The speed at which this machine's memory can be read: compiles dram.c for this processor and runs it."""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("dram.c")
BUFFER_BYTES = 2 << 30  # far more than any cache
MAPPINGS = ("huge", "memfd")


def measure(*, rounds: int) -> list[dict[str, Any]]:
    """Return medians over rounds: one row per mapping, piece (0: sequential), number of threads and prefetch
    distance."""
    with tempfile.TemporaryDirectory(prefix="np-dram-") as folder:
        program = str(Path(folder) / "dram")
        subprocess.run(["cc", "-std=c11", "-O3", "-march=native", "-pthread", str(SOURCE), "-o", program], check=True)
        rows = []
        for mapping in MAPPINGS:
            figures_by_key: dict[tuple[int, ...], list[float]] = defaultdict(list)
            command = [program, mapping, str(BUFFER_BYTES), str(rounds)]
            for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
                *key, figure = line.split()
                figures_by_key[tuple(map(int, key))].append(float(figure))
            for (piece, threads, ahead), figures in figures_by_key.items():
                rows.append(
                    {
                        "mapping": mapping,
                        "piece_bytes": piece,
                        "threads": threads,
                        "prefetch_pieces": ahead,
                        "bytes_per_s": statistics.median(figures),
                    }
                )
    return rows
