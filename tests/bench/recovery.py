"""The time to the next token after a process of a role is killed during generation, repeated.

    python tests/bench/recovery.py [--kills N] [--roles decode,loader,cache,prefill,coordinator] [PACKAGE] [--json]

The time is from the kill to the next token that a client receives. Tokens must equal those of an undisturbed run. It
asserts nothing about time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from neuronpipe.launch.planning import DEMO

from tests.faults.kills import Generations, asking
from tests.pipeline import Run, eventually, scratch_shell

PROMPT, TOKENS = [1, 200, 300], 400
APART_S = 7.0  # a run ends when a process dies more than 5 times within 30 s


def measure(run: Run, role: str, kills: int, expected: list[int]) -> list[float]:
    """Return the milliseconds from each kill to the next token."""
    draw = random.Random(role)
    took = []
    with Generations(asking(run, PROMPT, TOKENS), expected) as generations:
        for _ in range(kills):
            generations.next_token_after(time.monotonic())
            time.sleep(draw.uniform(0.0, 0.1))
            pid = run.pid(role)
            moment = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            took.append(1000 * generations.next_token_after(moment))
            time.sleep(APART_S)
    if generations.failure is not None:
        raise SystemExit(f"{role}: {generations.failure}")
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("package", nargs="?", type=Path, default=DEMO)
    parser.add_argument("--kills", type=int, default=15)
    parser.add_argument("--roles", default="decode,loader,cache,prefill,coordinator")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with scratch_shell() as shell, shell.up(arguments.package) as run:
        expected = run.ask(PROMPT, TOKENS)["token_ids"]
        for role in arguments.roles.split(","):
            took = sorted(measure(run, role, arguments.kills, expected))
            median, worst = statistics.median(took), took[-1]
            if arguments.json:
                print(
                    json.dumps({"role": role, "kills": len(took), "median_ms": median, "worst_ms": worst}),
                    flush=True,
                )
            else:
                print(f"{role:12} median {median:6.0f} ms, worst {worst:6.0f} ms, of {len(took)} kills", flush=True)
        assert eventually(lambda: run.status().ready)


if __name__ == "__main__":
    main()
