"""Messages that monitors receive: events, which the coordinator publishes to all subscribers. It publishes the `Beat`
messages of services as well."""

from __future__ import annotations

from neuronpipe.protocol.codec import Message, message
from neuronpipe.protocol.messages.lifecycle import State


@message
class Life(Message):
    """A process changed its state.

    role: as in `Hello`
    index: as in `Hello`
    state: the state in the coordinator's view
    detail: the reason, in one line; empty when all is as expected
    """

    role: str
    index: int
    state: State
    detail: str = ""


@message
class StepEvent(Message):
    """Steps of one kind, decode or prefill, were done, and their tokens were sent to clients. The event is sent once 25
    ms have passed since the first of these steps was sent, so a step that takes much longer has its own event. If
    events of both kinds are due, prefill comes first. Figures are sums over the steps. Counts and waiting times come
    from the counters of the participants.

    step: number of the last step
    batch: tokens computed: of decode steps one for each sequence and the drafted ones, of prefill steps all
    prefill: true if they were prefill steps
    ms: time from sending a step to the last answer
    misses: cluster parts that were not in memory
    read_bytes: bytes read from flash during the steps
    tokens: tokens that were sent to clients
    tbt_ms: for each step, the longest time between a token and the token before it in its sequence; 0 if all tokens
        were the first
    reads: reads of the loader during the steps
    looked_up: cluster parts that were needed, misses included
    rows: rows of gate, up and down together that were read from slots
    positions: positions whose keys and values were read, counted for each layer and head
    flash_ms: the part of `ms` spent waiting for flash, as a mean over the participants
    barrier_ms: the part of `ms` spent waiting for other participants, as a mean over them
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
