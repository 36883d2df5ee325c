"""Messages that the loader receives from the cache: free slots, and clusters to load ahead."""

from __future__ import annotations

from typing import Literal

from neuronpipe.protocol.codec import Message, message

Part = Literal[0, 1]


def _whole_words(name: str, packed: bytes) -> None:
    if len(packed) % 4:
        raise ValueError(f"{name}: expected a multiple of 4 bytes")


@message
class Reset(Message):
    """The first message of a cache. It is sent again whenever cache or loader was restarted. The loader forgets all
    slots, prefetches and warm-ups, keeps the demands, finishes the reads in flight, leaves no entry in the state
    loading, and answers `ResetDone`.

    generation: number of the reset, which grows each time. The loader drops a `Reset` whose generation has not grown,
        and after a `Reset` all messages of other generations
    """

    generation: int


@message
class Grant(Message):
    """From the cache: these slots are free. They belong to the loader until it has put a cluster into them. A `Grant`
    without slots means that the loader waits for slots and none can be freed now. Until the loader gets some, it reads
    the parts of a cluster one by one instead of waiting until both have a slot.

    generation: that of the last `Reset`
    part: 0 trigger, 1 value
    slots: slot numbers, little-endian uint32; empty at most once until the next `Grant` with slots
    """

    generation: int
    part: Part
    slots: bytes

    def __post_init__(self) -> None:
        _whole_words("slots", self.slots)


@message
class Trim(Message):
    """From the cache: no present entry names a slot from these numbers on, and none of these slots is granted. The
    loader returns the memory of their whole pages to the system, and answers `Trimmed`.

    generation: that of the last `Reset`
    trigger_slots: how many slots of part 0 keep their memory, counted from slot 0
    value_slots: how many slots of part 1 keep their memory
    """

    generation: int
    trigger_slots: int
    value_slots: int


@message
class Warm(Message):
    """From the cache: load these clusters when nothing more urgent is to be read.

    generation: that of the last `Reset`
    parts: 1 trigger, 2 value, 3 both in one read
    clusters: cluster indices, little-endian uint32
    pinned: true if the entries of these clusters are pinned (bit 27) when they become present
    """

    generation: int
    parts: Literal[1, 2, 3]
    clusters: bytes
    pinned: bool = False

    def __post_init__(self) -> None:
        _whole_words("clusters", self.clusters)
