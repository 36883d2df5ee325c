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
    """Steps of one kind, decode or prefill, were done, and their tokens were told. The event is sent once 25 ms have
    passed since the first of them was sent: one that takes much longer has its own. Where both kinds are told at once,
    prefill comes first. Figures are sums over the steps; counts and waiting times are from the participants' counters.

    step: number of the last one
    batch: tokens computed: sequences of a decode step, tokens of a prefill
    prefill: whether they were prefills
    ms: from sending a step to the last answer
    misses: cluster parts that were not in memory
    read_bytes: read from flash meanwhile
    tokens: tokens that they gave to clients
    tbt_ms: the longest time since the token before of any token of a step; 0 where all were the first of their texts
    reads: reads of the loader meanwhile
    looked_up: cluster parts that computing came to: the misses among them
    rows: of gates, ups and downs together, read from slots
    positions: whose keys and values were read, of each layer and head
    flash_ms: of it waited for flash, a mean over the participants
    barrier_ms: of it waited for other participants, likewise
    steps: how many they are
    gaps_ms: what `tbt_ms` sums up, one by one, without the zeros
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
