"""Messages that the loader receives: free slots and clusters to load ahead, from the cache; prefixes to save and to
restore, from the coordinator."""

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


@message
class Save(Message):
    """Write the keys and values of a KV slot to the prompt cache on disk, unless they are there. Nothing changes them
    until `Saved`.

    number: grows with every `Save` and `Restore`
    sequence: KV slot
    numerics: those of `Hello` in which they were computed
    tokens: from position 0 on, little-endian uint32
    state_slots: if layers have a state, slots with states after some of these tokens
    state_tokens: after how many tokens each of these states is
    """

    number: int
    sequence: int
    numerics: str
    tokens: bytes
    state_slots: tuple[int, ...] = ()
    state_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _whole_words("tokens", self.tokens)
        if len(self.state_slots) != len(self.state_tokens):
            raise ValueError("state_slots and state_tokens: expected the same length")


@message
class Hasten(Message):
    """A request waits for a slot that is being saved: answer `Saved` within about a second, and drop the rest.

    number: that of the last `Save`; earlier ones are meant too
    """

    number: int


@message
class Restore(Message):
    """Read the keys and values of these tokens from the prompt cache into a KV slot, as far as they are there. Nothing
    else uses the slot until `Restored`.

    number: as in `Save`
    sequence: KV slot
    numerics: as in `Save`
    tokens: as in `Save`
    first: how many of them the slot has
    min_tokens: restore nothing if fewer are in the prompt cache
    state_to: if layers have a state, the slot that receives the state; only as many tokens as a stored state has seen
        are restored
    """

    number: int
    sequence: int
    numerics: str
    tokens: bytes
    first: int = 0
    min_tokens: int = 0
    state_to: int | None = None

    def __post_init__(self) -> None:
        _whole_words("tokens", self.tokens)
