"""Kill processes of a served run 200 times at random moments, coordinator and gateway included.

python tests/nightly/kills.py [--kills N] [--seed N] [LOAD...]

LOAD: `text`: two clients want one text of the demo model over and over
      `prompts`: they want texts of prompts with common beginnings, more than there are KV slots
      `recurrent`: the same of a mixture with recurrent layers
      `drafts`: the same of one that has a draft layer besides
      `slices`: the same of a dense model with SiLU, whose feed-forwards are stored in slices
      default: all of them
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.measure.probe import cache_folder

from tests.faults.served_kills import OneText, Survived, survive
from tests.faults.shared_prompts import SharedPrompts
from tests.pipeline import Shell, scratch_shell


class Load(NamedTuple):
    """What the clients want, and the synthetic shape that answers; empty: the demo model."""

    clients: type[OneText] | type[SharedPrompts]
    shape: str = ""


LOADS = {
    "text": Load(OneText),
    "prompts": Load(SharedPrompts),
    "recurrent": Load(SharedPrompts, "qwen3.5-moe-100m"),
    "drafts": Load(SharedPrompts, "qwen3.5-moe-mtp-100m"),
    "slices": Load(SharedPrompts, "smollm2-135m"),
}


def synthesized(shell: Shell, shape: str) -> Path:
    """The package of a shape, in the folder of the shell."""
    package = shell.folder / shape
    _, errors = (process := shell.start("synth", shape, "-o", package)).communicate()
    assert process.returncode == 0, errors
    return package


@contextlib.contextmanager
def own_cache(folder: Path) -> Iterator[None]:
    """Use a cache with what is known of this device, and without prompts."""
    known, before = cache_folder(), os.environ.get("XDG_CACHE_HOME", "")
    if known is not None and known.is_dir():
        shutil.copytree(known, folder / "neuronpipe", ignore=lambda *_: ["prompts"])
    os.environ["XDG_CACHE_HOME"] = str(folder)
    try:
        yield
    finally:
        os.environ["XDG_CACHE_HOME"] = before


def report(survived: Survived) -> None:
    """Print what was counted."""
    print(f"{survived.texts} answers and {survived.streams} streams, all the same; nothing is left open")
    print(f"{survived.broken} streams broken off, {survived.refused} put off for a moment")
    if counts := survived.happened:
        print(f"{counts['texts']} texts, {counts['forks']} forks, {counts['hits']} prompts with cached tokens,")
        print(f"{counts['chunks']} of these with chunks of the prompt cache on disk")
    print(f"{sum(kill.early for kill in survived.kills)} answers had no token yet when a process was killed")
    for role, seconds in survived.took_s().items():
        middle, worst = 1000 * statistics.median(seconds), 1000 * max(seconds)
        print(f"{role:12} {len(seconds)} kills: next tokens after {middle:.0f} ms (median), {worst:.0f} ms (worst)")


def main() -> None:
    """Raise AssertionError if a text or stream differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("loads", nargs="*", metavar="LOAD", help=f"{', '.join(LOADS)}; default: all")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    arguments = parser.parse_args()
    for name in arguments.loads or LOADS:
        print(f"{name}: {arguments.kills} kills, --seed {arguments.seed}", flush=True)
        load = LOADS[name]
        with scratch_shell() as shell, own_cache(shell.folder / "cache"):
            package = synthesized(shell, load.shape) if load.shape else DEMO
            survived = survive(shell, arguments.kills, arguments.seed, load.clients, package, notices=True)
        report(survived)
        if load.clients is SharedPrompts:
            assert survived.happened["hits"] > arguments.kills, "hardly any prompt was reused"
            assert survived.happened["forks"] > arguments.kills // 10, "hardly any request forked"


if __name__ == "__main__":
    main()
