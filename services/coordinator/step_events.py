"""What monitors are told of steps, from what these took and what their participants counted: not of each by itself.

A small model makes a thousand steps a second, and an event for each, sent to every monitor, would take a good part of
their time. Steps within EVERY_MS share an event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from neuronpipe.protocol.channel import Publisher
from neuronpipe.protocol.messages.event import StepEvent
from neuronpipe.protocol.messages.worker import Prefill, Step
from neuronpipe.services.coordinator.sequences import Cost

EVERY_MS = 25


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A step whose tokens were told.

    sent_ns: when it was sent
    took: as `Meter.step_done` measured it
    counters: sums over the participants that answered, and under "answers" how many these were
    tokens: that were drawn
    gap_ms: the longest time since the token before of any of them; 0 where all were the first of their texts
    """

    message: Step | Prefill
    sent_ns: int
    took: Cost
    counters: Cost
    tokens: int
    gap_ms: float


class StepEvents:
    """Steps of which monitors were not told yet."""

    def __init__(self, events: Publisher) -> None:
        self._events = events
        self._steps: list[DoneStep] = []

    @property
    def waiting(self) -> bool:
        """Whether there are any."""
        return bool(self._steps)

    def add(self, step: DoneStep) -> None:
        """One more."""
        self._steps.append(step)

    def publish(self, now_ns: int) -> None:
        """Tell of them, once the first was sent EVERY_MS ago."""
        if not self._steps or now_ns - self._steps[0].sent_ns < EVERY_MS * 1_000_000:
            return
        if self._events.watched:
            for prefill in (True, False):
                if steps := [one for one in self._steps if isinstance(one.message, Prefill) is prefill]:
                    self._events.send(step_event(steps))
        self._steps = []


def step_event(steps: Sequence[DoneStep]) -> StepEvent:
    """The event of some steps of one kind, in their order."""

    def count(*names: str) -> int:
        return int(sum(one.counters.get(name, 0.0) for one in steps for name in names))

    def mean_ms(name: str) -> float:
        return round(sum(one.counters.get(name, 0.0) / max(1.0, one.counters.get("answers", 0.0)) for one in steps), 3)

    gaps_ms = tuple(round(one.gap_ms, 3) for one in steps if one.gap_ms)
    return StepEvent(
        step=steps[-1].message.step,
        batch=sum(len(one.message.tokens) for one in steps),
        prefill=isinstance(steps[-1].message, Prefill),
        ms=round(sum(one.took["ms"] for one in steps), 3),
        misses=count("trigger_missed", "value_missed"),
        read_bytes=int(sum(one.took["read_bytes"] for one in steps)),
        tokens=sum(one.tokens for one in steps),
        tbt_ms=round(sum(gaps_ms), 3),
        reads=int(sum(one.took["reads"] for one in steps)),
        looked_up=count("trigger_clusters", "value_clusters"),
        rows=count("gate_rows", "up_rows", "down_rows"),
        positions=sum(_positions(one.message) for one in steps),
        flash_ms=mean_ms("flash_ms"),
        barrier_ms=mean_ms("barrier_ms"),
        steps=len(steps),
        gaps_ms=gaps_ms,
    )


def _positions(sent: Step | Prefill) -> int:
    """Positions whose keys and values the step read. A prefill reads those before it once for all its tokens."""
    if isinstance(sent, Prefill):
        return sent.position + len(sent.tokens)
    return sum(position + 1 for position in sent.positions)
