"""200 kills at random moments of generations: every process of a run, the coordinator among them.

    python tests/nightly/kills.py [--kills N] [--seed N]

Every text must have the tokens of an undisturbed run, and afterwards the processes must have open what they had before.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from neuronpipe.launch.demo import DEMO

from tests.faults.kills import Generations, grown, kill_at_random, open_things
from tests.pipeline import Shell, eventually

PROMPT, TOKENS = [1, 200, 300], 120
OPTIONS = ("--ffn-resident", "30%", "--workers", "2")


def main() -> None:
    """Raises AssertionError when something differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    arguments = parser.parse_args()
    print(f"{arguments.kills} kills, --seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="np-") as folder:
        shell = Shell(Path(folder))
        with shell.up(DEMO, *OPTIONS) as run:
            expected = run.ask(PROMPT, TOKENS)["token_ids"]
            before = open_things(shell, run)
            with Generations(run, PROMPT, TOKENS, expected) as generations:
                took = kill_at_random(run, generations, arguments.kills, arguments.seed)
            assert generations.failure is None, generations.failure
            assert eventually(lambda: run.status().ready)
            assert eventually(lambda: not grown(before, open_things(shell, run))), grown(
                before, open_things(shell, run)
            )
        assert eventually(lambda: not shell.leftovers()), shell.leftovers()
    print(f"{generations.answers} texts of {TOKENS} tokens, all the same; nothing is left open")
    for role, seconds in sorted(took.items()):
        middle, worst = 1000 * statistics.median(seconds), 1000 * max(seconds)
        print(f"{role:12} {len(seconds)} kills: next token after {middle:.0f} ms (median), {worst:.0f} ms (worst)")


if __name__ == "__main__":
    main()
