"""The one step that is under way: who is busy with it, whether it still counts, what it took."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from neuronpipe.protocol.messages.worker import Prefill
from neuronpipe.services.coordinator.events import Broken, Left, Seat, SendStep
from neuronpipe.services.coordinator.sequences import Cost, Generation, Work, add_cost


class Outstanding:
    """A step from when it is sent until its logits were read. Tokens and positions stay, however often it is sent."""

    def __init__(self, action: SendStep, works: list[Work]) -> None:
        self.action = action
        self.works = works  # in the order of the logit rows; none where all were refused
        self.reading = False  # every participant is done, and the shell looks at the logits
        self._void = False
        self._busy: set[Seat] = set(action.seats)
        self._cost: Cost = {}  # this time it was sent

    @property
    def abandoned(self) -> bool:
        """Whether it does not count, and every participant has left it: it may be sent again."""
        return self._void and not self._busy and not self.reading

    @property
    def computed(self) -> bool:
        """Whether it counts, and every participant is done."""
        return not self._void and not self._busy

    def again(self, epoch: int) -> Outstanding:
        """The same step under the present epoch."""
        message = dataclasses.replace(self.action.message, epoch=epoch)
        return Outstanding(SendStep(self.action.seats, message), self.works)

    def is_meant(self, event: Left | Broken) -> bool:
        """Whether a participant speaks of this step, as it was last sent."""
        return (event.step, event.epoch) == (self.action.message.step, self.action.message.epoch)

    def epoch_changed(self, lost: Iterable[Seat]) -> None:
        """Everybody leaves. Where all were done before that, it counts nevertheless."""
        self._busy -= set(lost)
        self._void = not self.reading

    def left(self, event: Left) -> None:
        """A participant is through with it."""
        self._busy.discard(event.seat)
        self._void |= not event.done
        add_cost(self._cost, {**event.counters, "answers": 1.0})

    def refused(self, seat: Seat) -> None:
        """A participant cannot compute it; its works have been told."""
        self.works = []
        self._busy.discard(seat)

    def account(self, measured: Cost) -> None:
        """It is done: what it took goes to the account of every text in it. measured: by the shell."""
        message = self.action.message
        add_cost(self._cost, {**measured, "steps": 1.0, "tokens": float(len(message.tokens))})
        for work in self.works:
            if isinstance(work, Generation):
                add_cost(work.prefill_cost if isinstance(message, Prefill) else work.decode_cost, self._cost)
