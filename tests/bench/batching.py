"""The gain of batching: the same requests one after the other and all at once, through a live run.

    python tests/bench/batching.py [--run DIR] [--clients 4] [--tokens 256] [--rounds 5]

Every client has its own ZeroMQ connection and prompt. Rounds of both kinds alternate, so that a drift of the machine
affects both; the first of each warms up. Every sequence must have the same tokens either way. It asserts nothing about
speed. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from neuronpipe.protocol.channel import Connection, Poller, open_context
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.messages.client import Finished, Refused, Token
from neuronpipe.protocol.messages.request import Generate
from neuronpipe.protocol.run_directory import RunDirectory

PROMPTS = (
    "def fibonacci(n):",
    "class Stack:\n    def push(self, item):",
    "import os\n\ndef walk(path):",
    "for line in open(name):",
    'def test_parse(self):\n    """',
    "try:\n    value = int(text)",
    "class Server(Thread):",
    "def merge(left, right):",
)
Generated = dict[int, list[int]]


class Clients:
    """Client connections, each with its own prompt."""

    def __init__(self, endpoint: str, count: int, tokens: int) -> None:
        context = open_context()
        names = [f"client-{os.urandom(6).hex()}" for _ in range(count)]
        self._lines = [Connection(context, CONTROL, endpoint, name) for name in names]
        self._numbers = itertools.count()
        self._tokens = tokens
        self.count = count

    def generate(self, clients: Sequence[int]) -> tuple[Generated, float]:
        """Generate the sequences of these clients at once. Return the tokens of each and the seconds."""
        generated: Generated = {client: [] for client in clients}
        began = time.perf_counter()
        poller = Poller()
        for client in clients:
            poller.add(self._lines[client])
            prompt = PROMPTS[client % len(PROMPTS)] + "\n" * (client // len(PROMPTS))
            name = f"r{next(self._numbers)}"
            ask = Generate(request=name, prompt=prompt, max_tokens=self._tokens, share_prefix=False)
            self._lines[client].send(ask)
        numbers = {self._lines[client]: client for client in clients}
        open_clients = set(clients)
        while open_clients:
            for line in poller.wait():
                client = numbers[line]
                while (message := line.receive()) is not None:
                    if isinstance(message, Token):
                        generated[client].append(message.token)
                    elif isinstance(message, Refused):
                        sys.exit(f"client {client}: {message.message}")
                    elif isinstance(message, Finished):
                        open_clients.discard(client)
        return generated, time.perf_counter() - began

    def one_after_the_other(self) -> tuple[Generated, float]:
        """Generate the sequences of all clients one after the other."""
        generated, seconds = {}, 0.0
        for client in range(self.count):
            tokens, took = self.generate([client])
            generated |= tokens
            seconds += took
        return generated, seconds


def main() -> None:
    """Measure rounds of both kinds and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, metavar="DIR", help="run directory (default: the only live run)")
    parser.add_argument("--clients", type=int, default=4, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="of each text (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of either kind (default: %(default)s)")
    arguments = parser.parse_args()
    _, run_file = RunDirectory.find(arguments.run)
    clients = Clients(run_file.endpoints[CONTROL.name], arguments.clients, arguments.tokens)
    alone: list[float] = []
    together: list[float] = []
    for number in range(arguments.rounds + 1):
        expected, seconds = clients.one_after_the_other()
        generated, seconds_together = clients.generate(range(clients.count))
        if generated != expected:
            sys.exit("a text has other tokens among others than alone")
        tokens = sum(map(len, generated.values()))
        if number:
            alone.append(tokens / seconds)
            together.append(tokens / seconds_together)
    ratios = [all_at_once / single for all_at_once, single in zip(together, alone, strict=True)]
    for name, values in (("one after the other", alone), ("together", together), ("ratio", ratios)):
        print(f"{name:20} {statistics.median(values):8.2f}   {min(values):.2f} to {max(values):.2f}")


if __name__ == "__main__":
    main()
