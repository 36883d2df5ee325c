"""What monitors are told of a step, from what it took and what its members counted."""

from __future__ import annotations

from neuronpipe.protocol.messages.event import StepEvent
from neuronpipe.protocol.messages.worker import Prefill, Step
from neuronpipe.services.coordinator.sequences import Cost


def step_event(sent: Step | Prefill, took: Cost, counters: Cost, tokens: int, tbt_ms: float) -> StepEvent:
    """took: as `Meter.step_done` measured it. counters: sums over the members that answered, and under "answers" how
    many these were."""

    def count(*names: str) -> int:
        return int(sum(counters.get(name, 0.0) for name in names))

    answers = max(1.0, counters.get("answers", 0.0))
    return StepEvent(
        step=sent.step,
        batch=len(sent.tokens),
        prefill=isinstance(sent, Prefill),
        ms=round(took["ms"], 3),
        misses=count("gate_missed", "rest_missed"),
        read_bytes=int(took["read_bytes"]),
        tokens=tokens,
        tbt_ms=round(tbt_ms, 3),
        reads=int(took["reads"]),
        looked_up=count("gate_clusters", "rest_clusters"),
        rows=count("gate_rows", "up_rows", "down_rows"),
        positions=_positions(sent),
        flash_ms=round(counters.get("flash_ms", 0.0) / answers, 3),
        meet_ms=round(counters.get("meet_ms", 0.0) / answers, 3),
    )


def _positions(sent: Step | Prefill) -> int:
    """Positions whose keys and values the step read. A prefill reads those before it once for all its tokens."""
    if isinstance(sent, Prefill):
        return sent.position + len(sent.tokens)
    return sum(position + 1 for position in sent.positions)
