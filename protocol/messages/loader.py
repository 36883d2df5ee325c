"""What the loader receives from the cache: free slots, and what to load ahead."""

from __future__ import annotations

from typing import Literal

from neuronpipe.protocol.codec import Message, message

Part = Literal[0, 1]


def _whole_words(name: str, packed: bytes) -> None:
    if len(packed) % 4:
        raise ValueError(f"{name}: expected a multiple of 4 bytes")


@message
class Reset(Message):
    """The cache's first message, and sent again whenever cache or loader was restarted: forget all slots, prefetches
    and warm-ups, keep the demands, finish the reads in flight, leave no entry loading, then answer `ResetDone`.

    generation: grows with every reset. A reset whose generation has not grown is dropped, and from now on so are
        messages of other generations
    """

    generation: int


@message
class Grant(Message):
    """From the cache: these slots are free; they belong to the loader until it has put a cluster into them. Without
    slots: the loader waits for some and none can be freed now. Until it gets some, it reads the parts of a cluster one
    by one, where it would else wait until both have a slot.

    generation: that of the last `Reset`
    part: 0 trigger, 1 value
    slots: slot numbers, little-endian uint32; empty once for each time that they are used up
    """

    generation: int
    part: Part
    slots: bytes

    def __post_init__(self) -> None:
        _whole_words("slots", self.slots)


@message
class Trim(Message):
    """From the cache: no present entry names a slot from these on, and none is granted. Give the memory of their whole
    pages back to the system, then answer `Trimmed`.

    generation: that of the last `Reset`
    trigger_slots: slots of part 0 that keep their memory, from 0 on
    value_slots: the same of part 1
    """

    generation: int
    trigger_slots: int
    value_slots: int


@message
class Warm(Message):
    """From the cache: load these clusters when there is nothing more urgent to read.

    generation: that of the last `Reset`
    parts: 1 trigger, 2 value, 3 both, in one read
    clusters: cluster indices, little-endian uint32
    pinned: whether they are never to be evicted
    """

    generation: int
    parts: Literal[1, 2, 3]
    clusters: bytes
    pinned: bool = False

    def __post_init__(self) -> None:
        _whole_words("clusters", self.clusters)
