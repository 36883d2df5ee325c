"""The layouts of all segments: a function for each, with the segment's name, and its lengths as parameters."""

from __future__ import annotations

from neuronpipe.protocol.layouts.run import board, trace
from neuronpipe.protocol.layouts.step import exchange, kv, prefill_stage
from neuronpipe.protocol.layouts.weights import fixed, residency, slots
from neuronpipe.protocol.memory.layout import Layout

__all__ = ["KINDS", "board", "examples", "exchange", "fixed", "kv", "prefill_stage", "residency", "slots", "trace"]


def examples() -> tuple[Layout, ...]:
    """Return every layout with small lengths, for the specification and for tests."""
    return (
        fixed(file_bytes=100, predictor_bytes=50),
        slots(trigger_slots=3, trigger_slot_bytes=2816, value_slots=2, value_slot_bytes=8192),
        residency(clusters=10, ffns=2, participants=3),
        kv(position_words=16, sequences=2, context_tokens=8),
        exchange(
            tokens=2,
            width=32,
            output_width=32,
            query_width=32,
            neurons=64,
            blocks=2,
            rank=32,
            claims=17,
            experts_per_token=1,
            groups=1,
            logit_rows=3,
            vocabulary=50,
            workers=2,
            lane_words=96,
        ),
        board(processes=6, sequences=4),
        trace(rings=6, spans=8),
    )


KINDS = {layout.name: layout.kind for layout in examples()}
"""The kind of each segment in its header, by name."""
