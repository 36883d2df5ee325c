"""Run a mixed load for an hour and check that memory does not grow.

    python tests/nightly/soak.py [--minutes N] [--clients N] [--seed N]

The load consists of texts, streams, schemas, clients that leave, monitors that do not read, swaps and kills. About half
of the requests come over HTTP. Every text is one of a few whose tokens were computed at the start. Memory is
read about once a second, without the pages of programs and libraries, whose share depends on what else runs on the
machine. Its median over the last quarter may exceed that over the second quarter by 2 % and 2 MB. The open files and
sockets of the processes are counted as well.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from neuronpipe.launch.client import attach
from neuronpipe.launch.planning import DEMO
from neuronpipe.protocol.channel import Subscriber, open_context
from neuronpipe.protocol.links import EVENTS
from neuronpipe.protocol.messages.client import ScoreFinished
from neuronpipe.protocol.messages.request import Generate, Score

from tests.faults.kills import PROCESSES, grown, kill, open_things
from tests.faults.streams import Stream
from tests.http_client import Server, request, served
from tests.pipeline import Run, eventually, scratch_shell

PROMPTS = [[1, 200 + n, 300] * (1 + 8 * n) for n in range(6)]
LENGTHS = [1, 20, 100]
OPTIONS = ("--ffn-resident", "50%", "--workers", "2", "--sequences", "4")
COLOURS = ["red", "green", "blue"]
KINDS = {"text": 8, "score": 1, "left": 2, "stream": 6, "schema": 1, "hung_up": 2, "stuck_monitor": 1}  # kind: weight
DISTURBED_EVERY_S = 20.0  # kills and swaps take turns
PRINTED_EVERY = 60  # readings of memory
SWAPPED = ["decode.0", "decode.1", "loader", "cache", "prefill"]
MAX_GROWTH_SHARE, MAX_GROWTH_BYTES = 0.02, 2_000_000


class Load:
    """Clients that send random requests until the end."""

    def __init__(self, server: Server, clients: int, seed: int) -> None:
        self._server, self._run = server, server.run
        self.expected = {n: self._run.ask(prompt, max(LENGTHS))["token_ids"] for n, prompt in enumerate(PROMPTS)}
        self._streamed = {(n, length): self._stream_of(n, length)() for n in range(len(PROMPTS)) for length in LENGTHS}
        self.over = threading.Event()
        self.done: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.failure: str | None = None
        self._draws = [random.Random(seed + n) for n in range(clients)]
        # The helper process of a schema stays for a minute: without one here it would be more than there was before.
        self._schema(self._draws[0])
        self._threads = [threading.Thread(target=self._ask, args=(draw,)) for draw in self._draws]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join(120)

    def _ask(self, draw: random.Random) -> None:
        while not self.over.is_set() and self.failure is None:
            (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
            try:
                getattr(self, f"_{kind}")(draw)
            except Exception as error:  # raised in the main thread
                if "was restarted and has lost this request" not in str(error):  # a score may have to be repeated
                    self.failure = f"{kind}: {error!r}"
            self.done[kind] += 1

    def _text(self, draw: random.Random) -> None:
        n, length = draw.randrange(len(PROMPTS)), draw.choice(LENGTHS)
        answer = self._run.ask(PROMPTS[n], length)["token_ids"]
        assert answer == self.expected[n][:length], f"prompt {n}: {answer}, not {self.expected[n][:length]}"

    def _score(self, draw: random.Random) -> None:
        with attach(self._run.path) as client:
            for message in client.request(Score(request="s", tokens=tuple(draw.choice(PROMPTS)))):
                assert not isinstance(message, ScoreFinished) or message.tokens > 0

    def _left(self, draw: random.Random) -> None:
        """Send a request, and leave without cancelling it."""
        with attach(self._run.path) as client:
            client.send(Generate(request="left", tokens=tuple(draw.choice(PROMPTS)), max_tokens=200, temperature=0.0))
            time.sleep(draw.uniform(0.0, 0.2))

    def _stream_of(self, n: int, length: int) -> Stream:
        return Stream(self._server, prompt=PROMPTS[n], max_tokens=length)

    def _stream(self, draw: random.Random) -> None:
        n, length = draw.randrange(len(PROMPTS)), draw.choice(LENGTHS)
        stream = self._stream_of(n, length)
        assert stream() == self._streamed[n, length], f"stream of prompt {n}, {length} tokens"
        assert not stream.broken, "the gateway is not among those that are killed"

    def _schema(self, draw: random.Random) -> None:
        """Request an answer that must follow a schema, at temperature 1."""
        form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": {"enum": COLOURS}, "strict": True}}
        seed = draw.randrange(1 << 16)
        stream = Stream(self._server, prompt="colour", temperature=1.0, seed=seed, response_format=form)
        assert json.loads(stream()) in COLOURS

    def _hung_up(self, draw: random.Random) -> None:
        """Close an HTTP connection in the middle of a stream."""
        body = {"prompt": draw.choice(PROMPTS), "max_tokens": 200, "temperature": 0, "stream": True}
        with self._server.connect() as line:
            line.sendall(request("POST", "/v1/completions", body))
            time.sleep(draw.uniform(0.0, 0.2))

    def _stuck_monitor(self, draw: random.Random) -> None:
        """Subscribe to all events without reading them."""
        with open_context() as context:
            Subscriber(context, EVENTS, f"ipc://{self._run.path}/events")
            time.sleep(draw.uniform(1.0, 5.0))


def watch(run: Run, load: Load, seconds: float, seed: int) -> list[int]:
    """Return the memory of the run in bytes, about once a second. In between, processes are killed or replaced."""
    draw, end, disturb_at = random.Random(seed), time.monotonic() + seconds, time.monotonic() + DISTURBED_EVERY_S
    memory: list[int] = []
    swap_next = False
    while time.monotonic() < end:
        assert load.failure is None, load.failure
        memory.append(run.shell.pss_bytes(code=False))
        if len(memory) % PRINTED_EVERY == 0:
            print(f"{memory[-1] / 1e6:.1f} MB, {load.done}", flush=True)
        if time.monotonic() >= disturb_at:
            if swap_next:
                done = run.shell.call("swap", draw.choice(SWAPPED), "--run", run.path)
                assert done.code == 0, done.errors
            else:
                kill(run, *draw.choice(PROCESSES))
            swap_next = not swap_next
            disturb_at += DISTURBED_EVERY_S
        time.sleep(1.0)
    return memory


def main() -> None:
    """Raise AssertionError if memory grows or an answer differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    arguments = parser.parse_args()
    print(f"{arguments.minutes} minutes, {arguments.clients} clients, --seed {arguments.seed}", flush=True)
    with scratch_shell() as shell:
        with served(shell, DEMO, *OPTIONS, notices=True) as server:
            run = server.run
            with Load(server, arguments.clients, arguments.seed) as load:
                before = open_things(shell, run)
                memory = watch(run, load, 60 * arguments.minutes, arguments.seed)
            assert load.failure is None, load.failure
            assert eventually(lambda: run.status().sequences_active == 0, 30)
            assert eventually(lambda: not grown(before, open_things(shell, run))), grown(
                before, open_things(shell, run)
            )
        assert eventually(lambda: not shell.leftovers()), shell.leftovers()
    quarter = len(memory) // 4
    second, last = statistics.median(memory[quarter : 2 * quarter]), statistics.median(memory[-quarter:])
    print(f"{load.done}; memory {second / 1e6:.1f} MB in the second quarter, {last / 1e6:.1f} MB in the last")
    assert last <= second * (1 + MAX_GROWTH_SHARE) + MAX_GROWTH_BYTES, "memory grows"


if __name__ == "__main__":
    main()
