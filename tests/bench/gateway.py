"""The cost of the gateway: the same request through ZeroMQ and through HTTP, in turns, on one run of the demo.

    python -m tests.bench.gateway [--tokens 400] [--rounds 12]

A token's cost is the difference of the medians of (time from the first to the last token) / (tokens - 1); that of the
first token the difference of the medians of the time to it. Both ends are those of the client. `its cpu` is the
processor time of the gateway's process for each token, which other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import time

import psutil
from neuronpipe.launch.client import Client, attach
from neuronpipe.protocol.messages.client import Token
from neuronpipe.protocol.messages.request import Generate

from tests.http_client import Server, served
from tests.pipeline import scratch_shell

PROMPT = "def fibonacci(n):\n"


def through_zeromq(client: Client, tokens: int, number: int) -> tuple[float, float]:
    """Return the seconds to the first token, and the seconds per further token."""
    began, times = time.perf_counter(), []
    ask = Generate(request=f"bench-{number}", prompt=PROMPT, max_tokens=tokens, ignore_end=True)
    for message in client.request(ask):
        if isinstance(message, Token):
            times.append(time.perf_counter())
    assert len(times) == tokens
    return times[0] - began, (times[-1] - times[0]) / (tokens - 1)


def through_http(line: http.client.HTTPConnection, tokens: int) -> tuple[float, float]:
    """Return the same over an HTTP connection that is already open, as clients keep them."""
    options = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    began, times = time.perf_counter(), []
    line.request("POST", "/v1/completions", json.dumps(options), {"Content-Type": "application/json"})
    answer = line.getresponse()
    while event := answer.readline():
        if event.startswith(b"data: {"):
            times.append(time.perf_counter())
    return times[0] - began, (times[-1] - times[0]) / (len(times) - 1)


def measure(server: Server, tokens: int, rounds: int) -> None:
    """Print both paths and their difference."""
    figures: dict[str, list[tuple[float, float]]] = {"zeromq": [], "http": []}
    line = http.client.HTTPConnection("127.0.0.1", server.port)
    gateway = psutil.Process(server.run.pid("gateway"))
    busy = []
    with attach(server.run.path) as client:
        for number in range(rounds + 1):
            direct = through_zeromq(client, tokens, number)
            before = sum(gateway.cpu_times()[:2])
            http_ = through_http(line, tokens)
            busy.append(1000 * (sum(gateway.cpu_times()[:2]) - before) / tokens)
            if number:  # the first round warms up
                figures["zeromq"].append(direct)
                figures["http"].append(http_)
    medians = {
        path: [1000 * statistics.median(column) for column in zip(*rows, strict=True)] for path, rows in figures.items()
    }
    print(f"{'':<10}{'first token, ms':>18}{'a token, ms':>14}")
    for path, (first, each) in medians.items():
        print(f"{path:<10}{first:>18.2f}{each:>14.3f}")
    first, each = (medians["http"][n] - medians["zeromq"][n] for n in range(2))
    print(f"{'cost':<10}{first:>18.2f}{each:>14.3f}")
    print(f"{'its cpu':<10}{'':>18}{statistics.mean(busy[1:]):>14.3f}")


def main() -> None:
    """Measure on a run of `serve`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("options", nargs="*", help="for `serve`")
    arguments = parser.parse_args()
    with scratch_shell() as shell, served(shell, *arguments.options, notices=True) as server:
        measure(server, arguments.tokens, arguments.rounds)


if __name__ == "__main__":
    main()
