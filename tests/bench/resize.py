"""The pause of a resize: gaps between tokens while other requests come or go, so that other neurons are pinned.

    neuronpipe up PACKAGE --mode predicted --sequences 4 --ffn-resident 50% --warm
    python tests/bench/resize.py [--run DIR] [--visits 6] [--visitors 3]

One client generates without end; visitors come together and go together. The cache follows once the number of
sequences has been stable for a while (services/cache/residency.py). Gaps between the first client's tokens are of
four kinds: with or without visitors, and within the second in which the cache may follow or at another time. A resize
shows as a longest gap or a p99 that the same number of sequences does not have otherwise. A plan that pins the same
for every number of sequences is refused. It asserts nothing about speed. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np
from neuronpipe.plans.plan.document import read_plan
from neuronpipe.protocol.channel import Connection, Poller, open_context
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.messages.client import Finished, Refused, Token
from neuronpipe.protocol.messages.request import Generate
from neuronpipe.protocol.run_directory import RunDirectory
from neuronpipe.services.cache.residency import GROW_AFTER_S, SHRINK_AFTER_S

PROMPTS = ("def fibonacci(n):", "import os", "class Stack:", "try:", "for line in open(name):")
DUE_S = 1.0  # the cache moves its pins within this time after the number of sequences has been stable for long enough
TOKENS = 64  # of each request; clients that remain send another one


class Clients:
    """The first client and its visitors, each on its own connection."""

    def __init__(self, endpoint: str, visitors: int) -> None:
        context, self._poller = open_context(), Poller()
        self._lines = []
        for _ in range(1 + visitors):
            self._lines.append(Connection(context, CONTROL, endpoint, f"client-{os.urandom(6).hex()}"))
            self._poller.add(self._lines[-1])
        self._visited = False
        self._changed_s = self._last_s = 0.0
        self.gaps: dict[tuple[bool, bool], list[float]] = {}

    def measure(self, visits: int) -> None:
        """Fill `gaps`: milliseconds between tokens of the first client, by (visitors present, a resize due)."""
        self._ask(self._lines[0])
        for _ in range(visits):
            for visited, after_s in ((True, GROW_AFTER_S), (False, SHRINK_AFTER_S)):
                self._change(visited)
                self._for(after_s + 2 * DUE_S)

    def _change(self, visited: bool) -> None:
        self._visited = visited
        for line in self._lines[1:] if visited else ():
            self._ask(line)
        if not visited:
            self._for(0.0, until_alone=True)
        self._changed_s = time.perf_counter()

    def _for(self, seconds: float, *, until_alone: bool = False) -> None:
        end_s, visitors = time.perf_counter() + seconds, set(self._lines[1:])
        while visitors if until_alone else time.perf_counter() < end_s:
            for line in self._poller.wait():
                while (message := line.receive()) is not None:
                    if isinstance(message, Refused):
                        sys.exit(message.message)
                    if isinstance(message, Finished):
                        visitors.discard(line)
                        if line is self._lines[0] or self._visited:
                            self._ask(line)
                    elif isinstance(message, Token) and line is self._lines[0]:
                        self._note(message, counts=not until_alone)

    def _ask(self, line: Connection) -> None:
        prompt = PROMPTS[self._lines.index(line) % len(PROMPTS)]
        line.send(Generate(request="r", prompt=prompt, max_tokens=TOKENS, ignore_end=True, share_prefix=False))

    def _note(self, token: Token, *, counts: bool) -> None:
        now_s = time.perf_counter()
        held_s = now_s - self._changed_s - (GROW_AFTER_S if self._visited else SHRINK_AFTER_S)
        if token.index and counts:  # the first token waits for its prompt
            self.gaps.setdefault((self._visited, 0 <= held_s < DUE_S), []).append(1e3 * (now_s - self._last_s))
        self._last_s = now_s


def main() -> None:
    """Measure visits and print the gaps by kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, metavar="DIR", help="run directory (default: the only live run)")
    parser.add_argument("--visits", type=int, default=6, metavar="N", help="how often (default: %(default)s)")
    parser.add_argument("--visitors", type=int, default=3, metavar="N", help="that come (default: %(default)s)")
    arguments = parser.parse_args()
    directory, run_file = RunDirectory.find(arguments.run)
    pins = read_plan(directory.path / "plan.json").memory.pins
    if not any(1 < pin.texts <= 1 + arguments.visitors for pin in pins):
        sys.exit("this plan pins the same for so many sequences: nothing is resized")
    clients = Clients(run_file.endpoints[CONTROL.name], arguments.visitors)
    clients.measure(arguments.visits)
    print("gaps between tokens, ms          number     p50     p99   longest")
    for (visited, due), gaps in sorted(clients.gaps.items()):
        name = f"{'with visitors' if visited else 'alone'}, {'as a resize is due' if due else 'otherwise'}"
        p50, p99 = np.percentile(gaps, (50, 99))
        print(f"{name:32} {len(gaps):6} {p50:7.1f} {p99:7.1f}   {max(gaps):7.1f}")


if __name__ == "__main__":
    main()
