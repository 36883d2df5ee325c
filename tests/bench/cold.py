"""How a cold start feels: the page cache is dropped, a run begins, memory warms up, texts are asked meanwhile.

    python tests/bench/cold.py PACKAGE [--against CHECKOUT] [--rounds N] [--json] [-- PLAN OPTIONS]

Two kinds of round, in turns with those of another checkout where one is named:
  alone   from `up` until requests are served, and until all that was to be loaded is there; beside what the disk gives
          in sequence (direct reads of 1 MiB, eight at a time, by fio)
  asked   texts one after the other from the moment that requests are served: tokens/s of each; then the same texts in
          warm memory; when 80 % of their speed was reached for good, beside the time that reading the file once takes
Needs root (the page cache) and fio. Not a test: it asserts nothing about time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from neuronpipe.launch.bench.prompts import Prompts
from neuronpipe.plans.package.reader import Package

from tests.pipeline import COMMAND, Run, Shell, scratch_shell

TEXTS, PROMPT_TOKENS, MAX_TOKENS = 8, 16, 24
STEADY_S = 1.0  # nothing is read any more: memory is warm
NEAR_WARM = 0.8
GB = 1e9


def sequential_bytes_per_s(path: Path) -> float:
    """What the disk gives from end to end, by fio."""
    command = ["fio", "--name=read", f"--filename={path}", "--readonly", "--rw=read", "--direct=1", "--bs=1M"]
    command += ["--iodepth=8", "--ioengine=io_uring", "--output-format=json", "--runtime=4"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])


def cold_run(shell: Shell, program: tuple[str, ...], package: Path, options: list[str]) -> tuple[Run, float]:
    """A run started with nothing in the page cache, and the seconds until requests were served."""
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")
    began = time.monotonic()
    run = Run(shell, Path(shell.json("up", package, *options, program=program)["run"]))
    return run, time.monotonic() - began


def until_warm(run: Run) -> tuple[float, int]:
    """Waits until nothing is read any more: seconds until the last read, bytes in all."""
    began = last = time.monotonic()
    read = run.status().flash_bytes
    while time.monotonic() - last < STEADY_S:
        time.sleep(0.05)
        if (now := run.status().flash_bytes) != read:
            read, last = now, time.monotonic()
    return last - began, read


def alone(run: Run) -> dict[str, float]:
    """Nobody asks."""
    before = run.status().flash_bytes
    seconds, read = until_warm(run)
    return {"warm_s": seconds, "bytes_per_s": (read - before) / seconds if seconds else 0.0}


def asked(run: Run, prompts: list[list[int]]) -> dict[str, Any]:
    """Texts from the first moment on, and again in warm memory."""
    began = time.monotonic()
    first_ms, speeds, ends, reads = 0.0, [], [], 0
    for number, prompt in enumerate(prompts):
        answer = run.ask(prompt, MAX_TOKENS)
        first_ms = answer["ttft_ms"] if number == 0 else first_ms
        speeds.append(answer["tokens_per_s"])
        reads += answer["flash"]["reads"]
        ends.append(time.monotonic() - began)
    until_warm(run)
    warm = statistics.median(run.ask(prompt, MAX_TOKENS)["tokens_per_s"] for prompt in prompts)
    slow = [number for number, speed in enumerate(speeds) if speed < NEAR_WARM * warm]
    return {
        "first_token_ms": first_ms,
        "tokens_per_s": speeds,
        "warm_tokens_per_s": warm,
        "reads": reads,
        "near_warm_s": ends[slow[-1]] if slow else 0.0,  # the texts that began after this were fast
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, measured in turns")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments, options = parser.parse_known_args()
    options = [word for word in options if word != "--"]
    package = Package.open(arguments.package)
    texts = Prompts(package, None)
    prompts = [list(texts.take(n, PROMPT_TOKENS, PROMPT_TOKENS + MAX_TOKENS)) for n in range(TEXTS)]
    programs = {"here": COMMAND}
    if arguments.against:
        programs["against"] = (str(arguments.against / "launch" / "neuronpipe"),)
    with scratch_shell() as shell:
        for number in range(arguments.rounds):
            disk = sequential_bytes_per_s(package.bundles_path)
            for name, program in programs.items():
                for kind in ("alone", "asked"):
                    run, ready_s = cold_run(shell, program, arguments.package, options)
                    figures = alone(run) if kind == "alone" else asked(run, prompts)
                    run.down()
                    file_s = package.bundles_path.stat().st_size / disk
                    row = {"round": number, "who": name, "kind": kind, "ready_s": ready_s, "file_s": file_s, **figures}
                    print(json.dumps(row) if arguments.json else shown(row, disk), flush=True)


def shown(row: dict[str, Any], disk: float) -> str:
    """A row for a person."""
    head = f"{row['who']:8}{row['kind']:6} ready after {row['ready_s']:5.2f} s"
    if row["kind"] == "alone":
        return (
            f"{head}, warm after {row['warm_s']:5.2f} s more: {row['bytes_per_s'] / GB:.2f} GB/s of the disk's "
            f"{disk / GB:.2f} ({row['bytes_per_s'] / disk:.0%})"
        )
    speeds = " ".join(f"{speed:.1f}" for speed in row["tokens_per_s"])
    return (
        f"{head}, first token {row['first_token_ms']:.0f} ms, tokens/s {speeds}, warm {row['warm_tokens_per_s']:.1f}; "
        f"{row['reads']:,} reads; fast after {row['near_warm_s']:.1f} s, reading the file takes {row['file_s']:.1f} s"
    )


if __name__ == "__main__":
    main()
