"""Mixed load for an hour, memory that stays flat: texts short and long, scores, abandoned requests, kills.

    python tests/nightly/soak.py [--minutes N] [--clients N] [--seed N]

Every text is one of a few whose tokens are known from the start. Memory is what the run itself says, once a second; its
middle over the last quarter may exceed that over the second quarter by 2 % and 2 MB. What the processes have open is
counted as well.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from neuronpipe.launch.attached import attach
from neuronpipe.launch.demo import DEMO
from neuronpipe.protocol.messages.client import ScoreFinished
from neuronpipe.protocol.messages.request import Generate, Score

from tests.faults.kills import SEATS, grown, kill, open_things
from tests.pipeline import Run, Shell, eventually

PROMPTS = [[1, 200 + n, 300] * (1 + 8 * n) for n in range(6)]
LENGTHS = [1, 20, 100]
OPTIONS = ("--ffn-resident", "50%", "--workers", "2", "--sequences", "4")
KILL_EVERY_S = 40.0
MORE_SHARE, MORE_BYTES = 0.02, 2_000_000


class Load:
    """Clients that ask at random until told to stop."""

    def __init__(self, run: Run, clients: int, seed: int) -> None:
        self._run = run
        self.expected = {n: run.ask(prompt, max(LENGTHS))["token_ids"] for n, prompt in enumerate(PROMPTS)}
        self.over = threading.Event()
        self.done: dict[str, int] = dict.fromkeys(("text", "score", "left"), 0)
        self.failure: str | None = None
        self._draws = [random.Random(seed + n) for n in range(clients)]
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
            kind = draw.choices(("text", "score", "left"), (8, 1, 2))[0]
            try:
                getattr(self, f"_{kind}")(draw)
            except Exception as error:  # told in the main thread
                if "was restarted and has forgotten this text" not in str(error):  # a score may have to be asked again
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
        """A client that goes away without a word, its request on the way or its text half done."""
        with attach(self._run.path) as client:
            client.send(Generate(request="left", tokens=tuple(draw.choice(PROMPTS)), max_tokens=200, temperature=0.0))
            time.sleep(draw.uniform(0.0, 0.2))


def watch(run: Run, load: Load, seconds: float, seed: int) -> list[int]:
    """Bytes of the run, once a second; a process is killed now and then."""
    draw, end, kill_at = random.Random(seed), time.monotonic() + seconds, time.monotonic() + KILL_EVERY_S
    memory: list[int] = []
    while time.monotonic() < end:
        assert load.failure is None, load.failure
        memory.append(run.status().memory_bytes)
        if time.monotonic() >= kill_at:
            kill(run, *draw.choice(SEATS))
            kill_at += KILL_EVERY_S
        time.sleep(1.0)
    return memory


def main() -> None:
    """Raises AssertionError when something grows or differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    arguments = parser.parse_args()
    print(f"{arguments.minutes} minutes, {arguments.clients} clients, --seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="np-") as folder:
        shell = Shell(Path(folder))
        with shell.up(DEMO, *OPTIONS) as run:
            with Load(run, arguments.clients, arguments.seed) as load:
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
    assert last <= second * (1 + MORE_SHARE) + MORE_BYTES, "memory grows"


if __name__ == "__main__":
    main()
