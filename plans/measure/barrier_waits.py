"""Measuring what workers wait for each other: a barrier of a step, and a step's messages over ZeroMQ, there and back.

Both between processes, with the run's own channels, messages and barrier; workers on the decode cores, and who sends
the messages wherever the system puts it, as the coordinator.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.device.measured_points import Wait
from neuronpipe.plans.measure.benchmark_processes import BenchmarkProcess, OnMeasured, ignore_progress, measure_together
from neuronpipe.protocol.channel import Connection, Listener, Poller, open_context
from neuronpipe.protocol.errors import Lost
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.messages.outcome import StepDone
from neuronpipe.protocol.messages.worker import Step

BARRIERS, AT_ONCE = 400, 20  # of one repetition, and between two looks at the clock
STEPS = 50
WARM_UP_STEPS = 5
CONNECT_S = 10.0
ANSWER_MS = 10_000
COUNTERS = {f"counter_{n}": float(n) for n in range(20)}  # about as many as a worker reports


def measure_barriers(
    cores: Sequence[int | None], *, rounds: int, progress: OnMeasured = ignore_progress
) -> tuple[Wait, ...]:
    """One barrier, by how many of these cores take part."""

    def work(member: BenchmarkProcess) -> Iterator[Sequence[float]]:
        def some() -> None:  # by itself each barrier is quick for whoever comes last
            for _ in range(AT_ONCE):
                member.meet()

        for _ in range(rounds):
            member.meet()
            yield [_typical_us(some, BARRIERS // AT_ONCE) / AT_ONCE]

    return tuple(
        Wait(workers=count, us=_of_first(measure_together(cores[:count], work, progress)))
        for count in range(1, len(cores) + 1)
    )


def measure_messages(
    cores: Sequence[int | None], *, rounds: int, progress: OnMeasured = ignore_progress
) -> tuple[Wait, ...]:
    """From sending a step to the last worker's answer, by how many of these cores answer."""
    found = []
    for count in range(1, len(cores) + 1):
        with tempfile.TemporaryDirectory(prefix="neuronpipe-") as folder:
            members = [None, *cores[:count]]
            work = _messages(f"ipc://{Path(folder) / CONTROL.name}", rounds)
            found.append(Wait(workers=count, us=_of_first(measure_together(members, work, progress))))
    return tuple(found)


def _of_first(measured: Iterator[list[list[float]]]) -> Figure:
    return Figure.of([of_all[0][0] for of_all in measured])


def _typical_us(step: Callable[[], None], times: int) -> float:
    taken_us = []
    for _ in range(times):
        began = time.perf_counter()
        step()
        taken_us.append(1e6 * (time.perf_counter() - began))
    return statistics.median(taken_us)


def _messages(endpoint: str, rounds: int) -> Callable[[BenchmarkProcess], Iterator[Sequence[float]]]:
    steps = rounds * STEPS + WARM_UP_STEPS

    def work(member: BenchmarkProcess) -> Iterator[Sequence[float]]:
        if member.index == 0:
            yield from _coordinate(member, endpoint, rounds)
        else:
            _answer(member, endpoint, steps)
            yield from ([0.0] for _ in range(rounds))

    return work


def _coordinate(member: BenchmarkProcess, endpoint: str, rounds: int) -> Iterator[Sequence[float]]:
    with open_context() as context:
        listener, poller = Listener(context, CONTROL, endpoint), Poller()
        poller.add(listener)
        member.meet()
        workers = [f"decode-{n}" for n in range(member.count - 1)]
        ask = Step(
            step=1,
            epoch=1,
            participants=tuple(workers),
            first_blocks=tuple(range(len(workers))),
            end_blocks=tuple(range(1, len(workers) + 1)),
            sequences=(0,),
            positions=(100,),
            tokens=(1,),
        )

        def step() -> None:
            for worker in workers:
                _send(listener, worker, ask)
            left = len(workers)
            while left:
                if not poller.wait(ANSWER_MS):
                    raise RuntimeError("a worker did not answer")
                while listener.receive() is not None:
                    left -= 1

        for _ in range(WARM_UP_STEPS):
            step()
        yield from [[_typical_us(step, STEPS)] for _ in range(rounds)]


def _send(listener: Listener, worker: str, ask: Step) -> None:
    """Send it; a worker that has not connected yet is waited for."""
    until = time.monotonic() + CONNECT_S
    while True:
        try:
            return listener.send(worker, ask)
        except Lost:
            if time.monotonic() > until:
                raise
            time.sleep(0.001)


def _answer(member: BenchmarkProcess, endpoint: str, steps: int) -> None:
    number = member.index - 1
    with open_context() as context:
        member.meet()
        connection, poller = Connection(context, CONTROL, endpoint, f"decode-{number}"), Poller()
        poller.add(connection)
        done = StepDone(step=1, epoch=1, index=number, counters=COUNTERS)
        while steps and poller.wait(ANSWER_MS):
            while connection.receive() is not None:
                connection.send(done)
                steps -= 1
