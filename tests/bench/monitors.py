"""The cost of monitors: the same request with none, with one that reads, and with ten that never do, on the demo.

    python -m tests.bench.monitors [--tokens 400] [--rounds 12]

The monitor that reads is `neuronpipe watch --json`. The ten subscribe in each round and read nothing, so that their
queues fill while tokens are generated. A ratio is the median over the rounds of tokens/s relative to the same round
without monitors. Processor time and memory are the coordinator's; memory before the first round and after the last. All
tokens must be equal. It asserts nothing about speed. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from neuronpipe.launch.planning import DEMO
from neuronpipe.protocol.channel import Subscriber, open_context
from neuronpipe.protocol.links import EVENTS
from neuronpipe.protocol.messages.client import Token
from neuronpipe.protocol.run_directory import RunDirectory

from tests.pipeline import Run, eventually, scratch_shell

PROMPT = "def fibonacci(n):\n"
STUCK = 10
SETTLE_S = 0.5  # for a monitor to come or to go
Watched = Callable[[Run], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def no_monitor(run: Run) -> Iterator[None]:
    """Run without any monitor attached."""
    yield


@contextlib.contextmanager
def one_that_reads(run: Run) -> Iterator[None]:
    """Run with a monitor as users start it."""
    with tempfile.TemporaryFile() as output:
        process = run.shell.start("watch", "--json", "--run", run.path, stdout=output)
        assert eventually(lambda: os.fstat(output.fileno()).st_size)
        yield
        process.terminate()
        process.communicate()


@contextlib.contextmanager
def ten_that_never_read(run: Run) -> Iterator[None]:
    """Run with subscribers that never read."""
    endpoint = RunDirectory(run.path).endpoint(EVENTS)
    with open_context() as context:
        subscribers = [Subscriber(context, EVENTS, endpoint) for _ in range(STUCK)]
        assert eventually(
            lambda: all(subscriber.receive(1000) is not None for subscriber in subscribers)
        )  # any heartbeat
        yield


CASES: dict[str, Watched] = {"none": no_monitor, "one that reads": one_that_reads, "ten stuck": ten_that_never_read}


def tokens_per_s(run: Run, tokens: int, expected: list[int]) -> float:
    """Return the speed from the first token to the last, as a client sees them."""
    times: list[float] = []

    def note_time(token: Token) -> None:
        times.append(time.perf_counter())

    if run.ask(PROMPT, tokens, note_time, ignore_end=True)["token_ids"] != expected:
        sys.exit("a text has other tokens while it is watched")
    return (tokens - 1) / (times[-1] - times[0])


def measure(run: Run, tokens: int, rounds: int) -> None:
    """Print tokens/s and costs of each case."""
    expected = run.ask(PROMPT, tokens, ignore_end=True)["token_ids"]
    coordinator = psutil.Process(run.pid("coordinator"))
    before_bytes = coordinator.memory_info().rss
    speeds: dict[str, list[float]] = {name: [] for name in CASES}
    busy_s = dict.fromkeys(CASES, 0.0)
    for _ in range(rounds):
        for name, watched in CASES.items():
            with watched(run):
                time.sleep(SETTLE_S)
                before_s = sum(coordinator.cpu_times()[:2])
                speeds[name].append(tokens_per_s(run, tokens, expected))
                busy_s[name] += sum(coordinator.cpu_times()[:2]) - before_s
            time.sleep(SETTLE_S)
    print(f"{'monitors':<16}{'tokens/s':>10}{'least to most':>18}{'of none':>10}{'its cpu, us a token':>22}")
    for name, values in speeds.items():
        ratio = statistics.median(value / alone for value, alone in zip(values, speeds["none"], strict=True))
        spread = f"{min(values):.0f} to {max(values):.0f}"
        cpu_us = 1e6 * busy_s[name] / (rounds * tokens)
        print(f"{name:<16}{statistics.median(values):>10.0f}{spread:>18}{ratio:>10.3f}{cpu_us:>22.0f}")
    after_bytes = coordinator.memory_info().rss
    print(f"coordinator: {before_bytes / 1e6:.1f} MB before, {after_bytes / 1e6:.1f} MB after")


def main() -> None:
    """Measure on a run of the package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("package", nargs="?", type=Path, default=DEMO)
    arguments = parser.parse_args()
    with scratch_shell() as shell, shell.up(arguments.package) as run:
        measure(run, arguments.tokens, arguments.rounds)


if __name__ == "__main__":
    main()
