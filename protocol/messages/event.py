"""What monitors receive: events, published by the coordinator to whoever subscribes. `Beat` is passed on as well."""

from __future__ import annotations

from neuronpipe.protocol.codec import Message, message
from neuronpipe.protocol.messages.lifecycle import State


@message
class Life(Message):
    """A process changed its state.

    role: as in `Hello`
    index: as in `Hello`
    state: the coordinator's verdict
    detail: why, one line; empty when it went as expected
    """

    role: str
    index: int
    state: State
    detail: str = ""


@message
class StepEvent(Message):
    """A step was done.

    step: its number
    batch: tokens computed: sequences of a decode step, tokens of a prefill
    prefill: whether it was a prefill
    ms: from sending it to the last answer
    misses: cluster parts that were not in memory
    read_bytes: read from flash for it
    """

    step: int
    batch: int
    prefill: bool = False
    ms: float
    misses: int
    read_bytes: int
