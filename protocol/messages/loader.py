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
    """From the cache, before anything else and whenever one of the two was restarted: forget all slots and what is
    queued as prefetch or warm-up, keep the demands, finish the reads in flight, leave no word loading, then answer
    `ResetDone`.

    generation: grows with every reset, one that has not grown is dropped; from now on so are messages of another one
    """

    generation: int


@message
class Grant(Message):
    """From the cache: these slots are free and now the loader's, until it has put a cluster into them.

    generation: that of the last `Reset`
    part: 0 trigger, 1 value
    slots: slot numbers, little-endian uint32
    """

    generation: int
    part: Part
    slots: bytes

    def __post_init__(self) -> None:
        _whole_words("slots", self.slots)


@message
class Warm(Message):
    """From the cache: load these clusters when nothing more urgent waits.

    generation: that of the last `Reset`
    parts: 1 trigger, 2 value, 3 both, in one read
    clusters: residency word indices, little-endian uint32
    pinned: whether they are never to be evicted
    """

    generation: int
    parts: Literal[1, 2, 3]
    clusters: bytes
    pinned: bool = False

    def __post_init__(self) -> None:
        _whole_words("clusters", self.clusters)
