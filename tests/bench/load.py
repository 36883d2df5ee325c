"""Many streams at once through a gateway: the throughput of 64 and of 4, and fairness between two clients.

    python -m tests.bench.load [PACKAGE] [--streams 4 64] [--seconds 20] [--rounds 3] [OPTIONS of serve]

A stream sends one request after the other, each with its own prompt; tokens count once all streams have had one. Rounds
take turns, so that a drift of the machine affects all numbers of streams. For fairness a client with 48 streams of long
answers and one with 16 of short ones, each with its own key, run at the same time. It asserts nothing; errors are
counted. Nothing else may run meanwhile. The streams are read in this process, whose processor time is printed next to
that of the gateway and the coordinator.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import statistics
import time
from collections.abc import Sequence

import psutil

from tests.http_client import Server, request, served
from tests.pipeline import scratch_shell

PROMPTS = ("def fibonacci(n):\n", "class Stack:\n    def push(self, item):\n", "import os\n\ndef walk(path):\n")
WATCHED = ("gateway", "coordinator")


@dataclasses.dataclass
class Client:
    """Streams with the same key, and their counters: tokens, answers, errors, times to first token."""

    key: str
    streams: int
    text_tokens: int
    tokens: int = 0
    texts: int = 0
    errors: list[str] = dataclasses.field(default_factory=list)
    waits_s: list[float] = dataclasses.field(default_factory=list)


class Load:
    """A measurement of the streams of all clients."""

    def __init__(self, server: Server, clients: Sequence[Client]) -> None:
        self._server, self._clients = server, clients
        self._numbers = itertools.count()
        self._to_begin = sum(client.streams for client in clients)
        self._all_begun = asyncio.Event()

    async def run(self, seconds: float) -> tuple[float, dict[str, float]]:
        """Run for `seconds` once every stream has had a token. Return the real duration and the processor time of each
        process."""
        streams = [asyncio.create_task(self._ask(client)) for client in self._clients for _ in range(client.streams)]
        await self._all_begun.wait()
        for client in self._clients:
            client.tokens, client.texts, client.waits_s = 0, 0, []
        began, before = time.perf_counter(), busy_s(self._server)
        await asyncio.sleep(seconds)
        for stream in streams:
            stream.cancel()
        took_s = time.perf_counter() - began
        busy = {role: seconds - before[role] for role, seconds in busy_s(self._server).items()}
        await asyncio.gather(*streams, return_exceptions=True)
        return took_s, busy

    async def _ask(self, client: Client) -> None:
        begun = False
        while True:
            try:
                async for _ in self._text(client):
                    if not begun:
                        begun, self._to_begin = True, self._to_begin - 1
                        if not self._to_begin:
                            self._all_begun.set()
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                client.errors.append(str(error))
                await asyncio.sleep(0.1)

    async def _text(self, client: Client):  # type: ignore[no-untyped-def]
        """Send one request and yield at each token."""
        number = next(self._numbers)
        body = {
            "prompt": PROMPTS[number % len(PROMPTS)] + f"# {number}\n",
            "max_tokens": client.text_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        try:
            began = time.perf_counter()
            writer.write(request("POST", "/v1/completions", body, X_Api_Key=client.key))
            if b" 200 " not in await reader.readline():
                raise ValueError((await reader.read()).decode(errors="replace")[-200:])
            first = True
            while line := await reader.readline():
                if line.startswith(b'data: {"error"'):
                    raise ValueError(line.decode())
                if line.startswith(b"data: {") and b'"finish_reason": null' in line:
                    if first:
                        client.waits_s.append(time.perf_counter() - began)
                        first = False
                    client.tokens += 1
                    yield
            client.texts += 1
        finally:
            writer.close()


def busy_s(server: Server) -> dict[str, float]:
    """Return the processor time so far by process."""
    processes = {role: psutil.Process(server.run.pid(role)) for role in WATCHED} | {"bench": psutil.Process()}
    return {role: sum(process.cpu_times()[:2]) for role, process in processes.items()}


def throughput(server: Server, counts: Sequence[int], tokens: int, seconds: float, rounds: int) -> None:
    """Print tokens per second for each number of streams."""
    speeds: dict[int, list[float]] = {count: [] for count in counts}
    for number, count in itertools.product(range(rounds), counts):
        client = Client("one", count, tokens)
        took_s, busy = asyncio.run(Load(server, [client]).run(seconds))
        speeds[count].append(client.tokens / took_s)
        each = ", ".join(
            f"{role} {1000 * role_busy_s / max(1, client.tokens):.3f}" for role, role_busy_s in busy.items()
        )
        wait_ms = 1000 * statistics.median(client.waits_s or [0.0])
        print(
            f"round {number + 1}, {count:>3} streams: {speeds[count][-1]:>7.1f} tokens/s, {client.texts} texts, "
            f"first token after {wait_ms:.0f} ms, {len(client.errors)} errors {client.errors[:1]}; "
            f"processor ms a token: {each}"
        )
    medians = {count: statistics.median(rates) for count, rates in speeds.items()}
    for count in counts[1:]:
        print(f"{count} streams: {100 * medians[count] / medians[counts[0]]:.1f} % of the throughput of {counts[0]}")


def fairness(server: Server, tokens: int, seconds: float, rounds: int) -> None:
    """Print the tokens of two clients with different numbers of streams and lengths of answers."""
    ratios = []
    for number in range(rounds):
        many, few = Client("many", 48, 4 * tokens), Client("few", 16, tokens)
        asyncio.run(Load(server, [many, few]).run(seconds))
        ratios.append(many.tokens / max(1, few.tokens))
        errors = len(many.errors) + len(few.errors)
        print(f"round {number + 1}, 48 streams and 16: {many.tokens} and {few.tokens} tokens, {errors} errors")
    print(f"two clients: {statistics.median(ratios):.3f} times as many tokens for the one with 48 streams")


def main() -> None:
    """Measure throughput and fairness on a run of `serve`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="*", help="of `serve`; the demo if none")
    parser.add_argument("--streams", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--tokens", type=int, default=64, help="of a text")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    arguments, options = parser.parse_known_args()
    with scratch_shell() as shell, served(shell, *arguments.package, *options, notices=True) as server:
        throughput(server, arguments.streams, arguments.tokens, arguments.seconds, arguments.rounds)
        fairness(server, arguments.tokens, arguments.seconds, arguments.rounds)


if __name__ == "__main__":
    main()
