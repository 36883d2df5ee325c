"""Measurement of a step's barrier, and of a step's messages from the coordinator to the workers and back.

Processes use the same barrier, channels (ZeroMQ) and messages as a run. Workers are pinned to the decode cores; the
sender is not pinned, as the coordinator often is not.
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

BARRIERS, BATCH_BARRIERS = 400, 20  # in a repetition, and between two readings of the clock
STEPS = 50  # in a repetition
WARM_UP_STEPS = 5
CONNECT_S = 10.0
ANSWER_MS = 10_000
COUNTERS = {f"counter_{n}": float(n) for n in range(20)}  # a worker reports about as many counters with each step


def measure_barriers(
    cores: Sequence[int | None], *, rounds: int, progress: OnMeasured = ignore_progress
) -> tuple[Wait, ...]:
    """Measure a barrier of one process, of two, and so on up to one on each of `cores` (None: not pinned)."""

    def work(process: BenchmarkProcess) -> Iterator[Sequence[float]]:
        def barriers() -> None:  # one barrier alone would seem quick to the process that arrives last
            for _ in range(BATCH_BARRIERS):
                process.meet()

        for _ in range(rounds):
            process.meet()
            yield [_typical_us(barriers, BARRIERS // BATCH_BARRIERS) / BATCH_BARRIERS]

    return tuple(
        Wait(workers=count, us=_figure_of_first(measure_together(cores[:count], work, progress)))
        for count in range(1, len(cores) + 1)
    )


def measure_messages(
    cores: Sequence[int | None], *, rounds: int, progress: OnMeasured = ignore_progress
) -> tuple[Wait, ...]:
    """Measure the time from sending a step to the last answer, with one worker to one on each of `cores`."""
    waits = []
    for count in range(1, len(cores) + 1):
        with tempfile.TemporaryDirectory(prefix="neuronpipe-") as folder:
            processes_cores = [None, *cores[:count]]
            work = _message_work(f"ipc://{Path(folder) / CONTROL.name}", rounds)
            waits.append(Wait(workers=count, us=_figure_of_first(measure_together(processes_cores, work, progress))))
    return tuple(waits)


def _figure_of_first(measured: Iterator[list[list[float]]]) -> Figure:
    return Figure.of([figures[0][0] for figures in measured])


def _typical_us(step: Callable[[], None], count: int) -> float:
    times_us = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        times_us.append(1e6 * (time.perf_counter() - began))
    return statistics.median(times_us)


def _message_work(endpoint: str, rounds: int) -> Callable[[BenchmarkProcess], Iterator[Sequence[float]]]:
    steps = rounds * STEPS + WARM_UP_STEPS

    def work(process: BenchmarkProcess) -> Iterator[Sequence[float]]:
        if process.index == 0:
            yield from _act_as_coordinator(process, endpoint, rounds)
        else:
            _act_as_worker(process, endpoint, steps)
            yield from ([0.0] for _ in range(rounds))

    return work


def _act_as_coordinator(process: BenchmarkProcess, endpoint: str, rounds: int) -> Iterator[Sequence[float]]:
    with open_context() as context:
        listener, poller = Listener(context, CONTROL, endpoint), Poller()
        poller.add(listener)
        process.meet()
        workers = [f"decode-{n}" for n in range(process.count - 1)]
        message = Step(
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
                _send(listener, worker, message)
            missing_answers = len(workers)
            while missing_answers:
                if not poller.wait(ANSWER_MS):
                    raise RuntimeError("a worker did not answer")
                while listener.receive() is not None:
                    missing_answers -= 1

        for _ in range(WARM_UP_STEPS):
            step()
        yield from [[_typical_us(step, STEPS)] for _ in range(rounds)]


def _send(listener: Listener, worker: str, message: Step) -> None:
    """Send the message. Wait up to CONNECT_S for a worker that has not connected yet; then raise Lost."""
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            return listener.send(worker, message)
        except Lost:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)


def _act_as_worker(process: BenchmarkProcess, endpoint: str, steps: int) -> None:
    number = process.index - 1
    with open_context() as context:
        process.meet()
        connection, poller = Connection(context, CONTROL, endpoint, f"decode-{number}"), Poller()
        poller.add(connection)
        done = StepDone(step=1, epoch=1, index=number, counters=COUNTERS)
        while steps and poller.wait(ANSWER_MS):
            while connection.receive() is not None:
                connection.send(done)
                steps -= 1
