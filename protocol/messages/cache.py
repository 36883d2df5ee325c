"""What the cache receives, from the loader and from the coordinator."""

from __future__ import annotations

from neuronpipe.protocol.codec import Message, message


@message
class ResetDone(Message):
    """No read is in flight and no entry is loading; every slot that no present entry names belongs to the cache.

    generation: as in `Reset`
    """

    generation: int


@message
class SlotCounts(Message):
    """How many granted slots are left. Sent when a quarter of them is used, when clusters begin to wait for slots, when
    a figure has changed as another message is handled, and at the latest with the next beat. A loader without a
    generation sends it with generation 0, every 50 ms. The first one of the present generation means the same as
    `ResetDone`, in case that was lost.

    generation: that of the last `Reset`; 0 before the first
    trigger_free: free slots of part 0
    value_free: free slots of part 1
    trigger_waiting: clusters of part 0 that wait for a slot or to be read
    value_waiting: the same of part 1
    trigger_granted: slots of part 0 received since the `Reset`, from which the cache computes what is on its way
    value_granted: the same of part 1
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
    """From the loader: the memory is given back.

    generation: as in `Trim`
    """

    generation: int


@message
class Reserve(Message):
    """From the coordinator: keys and values and a prompt's stage need so much of the memory that is lent to slots. Take
    slots back until that is free, then answer `Reserved`. It replaces what was reserved before, which may have been
    more. A cache that starts finds the last one on the board.

    number: grows with every one, to tell answers apart
    reserved_bytes: of what the plan sets aside for KV cache and prefill
    """

    number: int
    reserved_bytes: int
