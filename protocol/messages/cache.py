"""What the cache receives from the loader."""

from __future__ import annotations

from neuronpipe.protocol.codec import Message, message


@message
class ResetDone(Message):
    """No read is in flight and no word is loading; every slot that no present word names is the cache's.

    generation: as in `Reset`
    """

    generation: int


@message
class SlotCounts(Message):
    """How many granted slots are left: sent when a quarter of them is used, when clusters begin to wait for slots, and
    when anything has changed as another message is handled, at the latest with the next beat. A loader that was given
    no generation yet says so, every 50 ms, with generation 0; the first one of the present generation says what
    `ResetDone` says, should that be lost.

    generation: that of the last `Reset`; 0 before the first
    trigger_free: free slots of part 0
    value_free: free slots of part 1
    trigger_waiting: clusters of part 0 that wait for a slot or for their turn
    value_waiting: the same of part 1
    trigger_granted: slots of part 0 received since the `Reset`: the cache knows by it what is still on its way
    value_granted: the same of part 1
    """

    generation: int
    trigger_free: int
    value_free: int
    trigger_waiting: int = 0
    value_waiting: int = 0
    trigger_granted: int = 0
    value_granted: int = 0
