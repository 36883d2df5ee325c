"""Messages that the cache receives, from the loader and from the coordinator."""

from __future__ import annotations

from neuronpipe.protocol.codec import Message, message


@message
class ResetDone(Message):
    """From the loader: no read is in flight and no entry is in the state loading. Every slot that no present entry
    names belongs to the cache.

    generation: as in `Reset`
    """

    generation: int


@message
class SlotCounts(Message):
    """From the loader: how many of the granted slots are free. If a count has changed, the loader sends it when a
    quarter of the free slots is used, when clusters begin to wait for slots, and after another message, at the latest
    the next `AskBeat`. Before its first `Reset` it sends it every 50 ms, with generation 0. The first one of the
    present generation means the same as `ResetDone`, in case that message was lost.

    generation: that of the last `Reset`; 0 before the first
    trigger_free: free slots of part 0
    value_free: free slots of part 1
    trigger_waiting: clusters whose part 0 waits for a slot or to be read
    value_waiting: the same for part 1
    trigger_granted: slots of part 0 received since the `Reset`; the other slots that the cache granted are under way
    value_granted: the same for part 1
    """

    generation: int
    trigger_free: int
    value_free: int
    trigger_waiting: int = 0
    value_waiting: int = 0
    trigger_granted: int = 0
    value_granted: int = 0


@message
class Trimmed(Message):
    """From the loader: the memory is returned to the system.

    generation: as in `Trim`
    """

    generation: int


@message
class Reserve(Message):
    """From the coordinator: how much memory keys, values and the buffers of prefill need now. Weight slots may have
    borrowed it: the cache evicts clusters until that much is free, and then answers `Reserved`. The message replaces
    the last reservation, which may have been larger. A cache that starts reads the last one from the board.

    number: grows with every `Reserve`, so that answers can be matched
    reserved_bytes: how much of the memory that the plan sets aside for KV cache and prefill
    """

    number: int
    reserved_bytes: int
