"""How many slots there are now: those of the plan, and as many of the lent ones as what is reserved leaves; fewer
while memory is short.

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

from neuronpipe.plans.cost.activation_rates import rates
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.borrowed_memory import Lendable, Slots, lent_slots, without
from neuronpipe.plans.plan.document import Compute, Memory
from neuronpipe.plans.plan.segment_sizes import open_clusters

GIVE_UP_AFTER_S = 1.0


class Resizing:
    """slots: how many the regions have; least: as few of either part may be. vacates: whether it is not steady."""

    def __init__(self, manifest: Manifest, compute: Compute, memory: Memory) -> None:
        self._memory, self._lendable = memory, Lendable.of(manifest, compute, memory)
        places = manifest.slots(moved=memory.are_scales_moved)
        self._slot_bytes = places.trigger_bytes, places.value_bytes
        read = rates(manifest, compute.mode)
        self._alike = compute.mode == "predicted" or read.value_read >= read.trigger_read  # wanted whole or not at all
        if memory.trigger_slots < manifest.clusters:  # else their numbers do not tell
            self._alike |= memory.trigger_slots == memory.value_slots
        self._reserved_bytes = self._withheld_bytes = 0
        # As many as may be open again, free or on their way.
        self.least = min(manifest.clusters, max(memory.moving_slots, 2 * open_clusters(manifest, compute)))
        self._number: int | None = None  # of a reservation that is to be answered
        self.vacates = True  # what lies behind was another cache's
        self._asked_s: float | None = None
        self.slots: Slots = (memory.trigger_slots, memory.value_slots)

    def reserve(self, number: int | None, reserved_bytes: int) -> None:
        """So much is to be free; number: of the message that says so."""
        self._number, self._reserved_bytes = number, reserved_bytes

    def withhold(self, withheld_bytes: int) -> bool:
        """Slots are to give so much back. Returns whether that is new."""
        changed = withheld_bytes != self._withheld_bytes
        self._withheld_bytes = withheld_bytes
        return changed

    def begin(self) -> Slots:
        """The slots from now on. Where they are fewer than before, `vacates` says so from now on."""
        before, memory = self.slots, self._memory
        triggers, values = memory.trigger_slots, memory.value_slots
        if memory.lends:
            lent = lent_slots(memory, self._lendable, self._reserved_bytes)
            triggers, values = triggers + lent[0], values + lent[1]
        least = min(self.least, triggers), min(self.least, values)
        self.slots = without((triggers, values), self._withheld_bytes, self._slot_bytes, least=least, alike=self._alike)
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
