"""How many slots there are now: those of the plan, and as many of the lent ones as what is reserved leaves.

    state      event                                                            next
    steady     fewer are wanted: regions end there, and the loader is reset     vacating
    vacating   no present entry names a slot behind: the loader is asked for    asked
               their memory
    asked      it has given that back: what was to be reserved is free          steady
    steady     more are wanted: they are used at once                           steady

Without sockets. Slots that are to go are emptied whatever they hold: what is hot is read again, into others. What the
loader does not give back within a second it never will: one for an older protocol knows nothing of it.
"""

from __future__ import annotations

from neuronpipe.plans.plan.lending import Lendable, lent_slots
from neuronpipe.plans.plan.plan import Memory

Slots = tuple[int, int]
"""Triggers and values."""
GIVE_UP_AFTER_S = 1.0


class Resizing:
    """slots: how many the regions have. lends: whether that ever changes; vacates: whether it is not steady."""

    def __init__(self, memory: Memory, lendable: Lendable) -> None:
        self._memory, self._lendable = memory, lendable
        self._reserved_bytes = 0
        self._number: int | None = None  # of a reservation that is to be answered
        self.lends = memory.lends
        self.vacates = self.lends  # what lies behind was another cache's
        self._asked_s: float | None = None
        self.slots: Slots = (memory.trigger_slots, memory.value_slots)

    def reserve(self, number: int | None, reserved_bytes: int) -> None:
        """So much is to be free; number: of the message that says so."""
        self._number, self._reserved_bytes = number, reserved_bytes

    def begin(self) -> Slots:
        """The slots from now on. Where they are fewer than before, `vacates` says so from now on."""
        before = self.slots
        if self.lends:
            triggers, values = lent_slots(self._memory, self._lendable, self._reserved_bytes)
            self.slots = self._memory.trigger_slots + triggers, self._memory.value_slots + values
        if any(now < then for now, then in zip(self.slots, before, strict=True)):
            self.vacates, self._asked_s = True, None
        return self.slots

    def asked(self, now_s: float) -> None:
        """Everything is empty, and the loader was asked for the memory."""
        self._asked_s = now_s

    def is_asked(self, now_s: float) -> bool:
        """Whether the loader was asked; one that does not answer is not waited for."""
        if self._asked_s is not None and now_s - self._asked_s > GIVE_UP_AFTER_S:
            self.trimmed()
        return self._asked_s is not None

    def restarted(self) -> None:
        """The loader is reset, or another one: what was asked before is lost."""
        self._asked_s = None

    def trimmed(self) -> None:
        """The memory is given back."""
        self.vacates = False

    def answer(self) -> int | None:
        """The number of a reservation that holds now, once."""
        number, self._number = self._number, None
        return number
