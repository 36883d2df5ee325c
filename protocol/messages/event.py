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
    """A step was done, and its tokens were told. Counts and times of waiting are of its members' counters.

    step: its number
    batch: tokens computed: sequences of a decode step, tokens of a prefill
    prefill: whether it was a prefill
    ms: from sending it to the last answer
    misses: cluster parts that were not in memory
    read_bytes: read from flash for it
    tokens: tokens that it gave to clients
    tbt_ms: the longest time since the token before of any of them; 0 where all were the first of their texts
    reads: reads of the loader meanwhile
    looked_up: cluster parts that computing came to: the misses among them
    rows: of gates, ups and downs together, read from slots
    positions: whose keys and values were read, of each layer and head
    flash_ms: of it waited for flash, a mean over the members
    meet_ms: of it waited for other members, likewise
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
    meet_ms: float = 0.0
