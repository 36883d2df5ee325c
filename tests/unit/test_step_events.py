"""Monitors are told of fast steps together, and of slow ones one by one."""

from __future__ import annotations

from typing import Any

from neuronpipe.protocol.messages.event import StepEvent
from neuronpipe.protocol.messages.worker import Prefill, Step
from neuronpipe.services.coordinator.telemetry import EVERY_MS, DoneStep, StepEvents

MS = 1_000_000
SHARES: dict[str, Any] = {"participants": ("decode.0",), "first_blocks": (0,), "end_blocks": (1,)}
COUNTERS = {"trigger_clusters": 8.0, "value_clusters": 4.0, "value_missed": 3.0, "up_rows": 5.0, "flash_ms": 4.0}


class Heard:
    """A publisher that keeps what it is told."""

    def __init__(self, watched: bool = True) -> None:
        self.watched = watched
        self.events: list[StepEvent] = []

    def send(self, event: StepEvent) -> None:
        self.events.append(event)


def decode(step: int, sent_ms: float, gap_ms: float = 1.0) -> DoneStep:
    """A step of two sequences that two participants answered."""
    message = Step(step=step, epoch=1, **SHARES, sequences=(0, 1), positions=(9, 19), tokens=(5, 6))
    took = {"ms": 0.75, "read_bytes": 4096, "reads": 2}
    return DoneStep(message, int(sent_ms * MS), took, {**COUNTERS, "answers": 2.0}, 2, gap_ms)


def prefill(step: int, sent_ms: float) -> DoneStep:
    message = Prefill(step=step, epoch=1, sequence=0, position=3, tokens=(1, 2, 3, 4), logits="last")
    return DoneStep(message, int(sent_ms * MS), {"ms": 5.0, "read_bytes": 0, "reads": 0}, {"answers": 1.0}, 1, 0.0)


def told(*steps: DoneStep, now_ms: float) -> list[StepEvent]:
    heard: Any = Heard()
    events = StepEvents(heard)
    for one in steps:
        events.add(one)
    events.publish(int(now_ms * MS))
    assert events.waiting == (not heard.events)
    return list(heard.events)


def test_fast_steps_share_an_event_whose_figures_are_sums() -> None:
    steps = [decode(7, 0.0, 1.25), decode(8, 1.0, 0.75), decode(9, 2.0, 2.0)]
    assert told(*steps, now_ms=EVERY_MS - 1) == []
    (event,) = told(*steps, now_ms=EVERY_MS)
    assert event == StepEvent(
        step=9,
        steps=3,
        batch=6,
        tokens=6,
        ms=2.25,
        misses=9,
        looked_up=36,
        rows=15,
        read_bytes=12288,
        reads=6,
        positions=90,
        flash_ms=6.0,
        tbt_ms=4.0,
        gaps_ms=(1.25, 0.75, 2.0),
    )


def test_a_step_that_takes_long_has_an_event_of_its_own() -> None:
    (event,) = told(decode(7, 0.0, 90.0), now_ms=80.0)
    assert (event.step, event.steps, event.tbt_ms, event.gaps_ms) == (7, 1, 90.0, (90.0,))


def test_prompts_and_answers_are_told_apart() -> None:
    first, second = told(decode(6, 0.0), prefill(7, 1.0), decode(8, 6.0, gap_ms=0.0), now_ms=30.0)
    assert (first.prefill, first.step, first.steps, first.batch, first.positions) == (True, 7, 1, 4, 7)
    assert (second.prefill, second.step, second.steps, second.gaps_ms) == (False, 8, 2, (1.0,))


def test_what_nobody_heard_is_forgotten() -> None:
    nobody: Any = Heard(watched=False)
    events = StepEvents(nobody)
    events.add(decode(1, 0.0))
    events.publish(EVERY_MS * MS)
    nobody.watched = True
    events.publish(9 * EVERY_MS * MS)
    assert (nobody.events, events.waiting) == ([], False)
