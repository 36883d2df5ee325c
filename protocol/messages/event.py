"""What monitors receive: events, published by the coordinator to all subscribers. `Beat` is passed on as well."""

from __future__ import annotations

from neuronpipe.protocol.codec import Message, message
from neuronpipe.protocol.messages.lifecycle import State


@message
class Life(Message):
    """A process changed its state.

    role: as in `Hello`
    index: as in `Hello`
    state: as the coordinator sees it
    detail: the reason, one line; empty when all is as expected
    """

    role: str
    index: int
    state: State
    detail: str = ""


@message
class StepEvent(Message):
    """Steps of one kind, decode or prefill, were done, and their tokens were sent to clients. The event is sent once
    25 ms have passed since the first of these steps was sent, so a step that takes much longer has its own. If events
    of both kinds are due, prefill comes first. Figures are sums over the steps; counts and waiting times are from the
    participants' counters.

    step: number of the last one
    batch: tokens computed: sequences of a decode step, tokens of a prefill
    prefill: whether they were prefills
    ms: from sending a step to the last answer
    misses: cluster parts that were not in memory
    read_bytes: read from flash during the steps
    tokens: tokens that were sent to clients
    tbt_ms: for each step the longest time between a token and the one before it in its text; 0 if all were the first
    reads: reads of the loader during the steps
    looked_up: cluster parts that were needed, misses included
    rows: rows of gates, ups and downs together that were read from slots
    positions: positions whose keys and values were read, counted for each layer and head
    flash_ms: part of `ms` spent waiting for flash, mean over the participants
    barrier_ms: part of `ms` spent waiting for other participants, likewise
    steps: number of steps
    gaps_ms: the times of which `tbt_ms` is the sum, without the zeros
    """

    step: int
    batch: int
    prefill: bool = False
    ms: float
    misses: int
    read_bytes: int
    tokens: int = 0
    tbt_ms: float = 0.0
    reads: int = 0
    looked_up: int = 0
    rows: int = 0
    positions: int = 0
    flash_ms: float = 0.0
    barrier_ms: float = 0.0
    steps: int = 1
    gaps_ms: tuple[float, ...] = ()
