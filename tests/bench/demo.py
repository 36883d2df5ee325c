"""Speed of the demo model on this machine: `python tests/bench/demo.py [PACKAGE]`. Not a test: it asserts nothing.

Medians over several runs: tokens per second in memory and at half and a tenth of the feed-forward bytes, time to the
first token of a 16-token prompt on a warm run, and the time from the command to the first character of a cold `run`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "neuronpipe.launch"]
PROMPT = "def read_header(path):\n    with open(path) as file:\n"  # 16 tokens of the demo's tokenizer
REPEATS = 5


def call(*words: str) -> dict[str, Any]:
    """Run a verb with --json and return its object."""
    done = subprocess.run([*COMMAND, *words, "--json"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def cold_first_character_s(package: list[str]) -> float:
    """From starting the command to the first character after the prompt."""
    start = time.monotonic()
    with subprocess.Popen(
        [*COMMAND, "run", *package, "-p", "x", "-n", "4"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        process.stdout.read(2)
        first = time.monotonic() - start
        process.stdout.read()
    return first


def warm(package: list[str], *limits: str) -> dict[str, float]:
    """Medians of several requests to a run that stays."""
    with tempfile.TemporaryDirectory(prefix="np") as folder:
        run = str(Path(folder) / "r")
        call("up", *package, "--run", run, *limits)
        try:
            answers = [call("ask", "--run", run, "-p", PROMPT, "-n", "200") for _ in range(REPEATS + 1)][1:]
        finally:
            call("down", "--run", run)
    return {
        "prompt_tokens": answers[0]["prompt_tokens"],
        "tokens_per_s": statistics.median(a["tokens_per_s"] for a in answers),
        "ttft_ms": statistics.median(a["ttft_ms"] for a in answers),
        "tbt_p50_ms": statistics.median(a["tbt_ms"]["p50"] for a in answers),
        "tbt_p99_ms": statistics.median(a["tbt_ms"]["p99"] for a in answers),
        "flash_mb_per_token": statistics.median(a["flash"]["bytes"] / a["tokens"] / 1e6 for a in answers),
        "miss_rate": statistics.median(a["flash"]["miss_rate"] for a in answers),
        "peak_memory_mb": max(a["memory"]["peak_bytes"] for a in answers) / 1e6,
    }


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("package", nargs="?", help="package directory (default: the demo)")
    package = [found] if (found := parser.parse_args().package) else []
    cold = statistics.median(cold_first_character_s(package) for _ in range(REPEATS))
    print(f"cold run, command to first character: {cold:.2f} s")
    rows = {"in memory": (), "half resident": ("--ffn-resident", "50%"), "a tenth resident": ("--ffn-resident", "10%")}
    for name, limits in rows.items():
        figures = warm(package, *limits)
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
