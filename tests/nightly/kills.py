"""Kill processes of a served run 200 times at random moments of generations, coordinator and gateway included.

python tests/nightly/kills.py [--kills N] [--seed N]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.faults.served_kills import survive
from tests.pipeline import scratch_shell


def main() -> None:
    """Raise AssertionError if a text or stream differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    arguments = parser.parse_args()
    print(f"{arguments.kills} kills, --seed {arguments.seed}", flush=True)
    with scratch_shell() as shell:
        survived = survive(shell, arguments.kills, arguments.seed)
    print(f"{survived.texts} texts, all the same; nothing is left open")
    print(f"{survived.streams} streams of it, {survived.broken} broken off, {survived.refused} put off for a moment")
    for role, seconds in sorted(survived.took.items()):
        middle, worst = 1000 * statistics.median(seconds), 1000 * max(seconds)
        print(f"{role:12} {len(seconds)} kills: next tokens after {middle:.0f} ms (median), {worst:.0f} ms (worst)")


if __name__ == "__main__":
    main()
