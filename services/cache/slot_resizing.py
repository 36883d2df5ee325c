"""The current number of slots: those of the plan, plus the borrowed ones that reservations leave, minus those withheld
while memory is short.

    state       event                                                                           next
    steady      fewer slots are needed: regions shrink, and the loader is reset                 vacating
    vacating    no present entry names a slot beyond the new end: `Trim` is sent to the loader  requested
    requested   the loader has freed their memory: the reservation holds                        steady
    steady      more slots are needed: they are used at once                                    steady

All slots beyond the new end are emptied; hot clusters among them are read again. If the loader does not answer `Trim`
within GIVE_UP_AFTER_S, it counts as done, since `Trim` is optional in the protocol.
"""

from __future__ import annotations

from neuronpipe.plans.cost.activation_rates import rates
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.borrowed_memory import BorrowableMemory, PartCounts, reclaim_slots, usable_borrowed_slots
from neuronpipe.plans.plan.document import Compute, Memory
from neuronpipe.plans.plan.segment_sizes import open_clusters

GIVE_UP_AFTER_S = 1.0


class Resizing:
    """The number of slots of both parts, and the changes that are under way.

    slots: current numbers of trigger and value slots
    min_slots: neither part may have fewer, unless it has fewer from the start
    vacates: True while the state is not steady
    """

    def __init__(self, manifest: Manifest, compute: Compute, memory: Memory) -> None:
        self._memory, self._lendable = memory, BorrowableMemory.of(manifest, compute, memory)
        places = manifest.slots(moved=memory.are_scales_moved)
        self._slot_bytes = places.trigger_bytes, places.value_bytes
        read = rates(manifest, compute.mode)
        # Equal numbers of both parts are reclaimed if steps need both parts of a cluster together.
        self._alike = compute.mode == "predicted" or read.value_read >= read.trigger_read
        if memory.trigger_slots < manifest.clusters:  # with a slot for every trigger part, equal numbers mean nothing
            self._alike |= memory.trigger_slots == memory.value_slots
        self._reserved_bytes = self._withheld_bytes = 0
        # Steps may have this many clusters open; as many slots again are free or being filled.
        self.min_slots = min(manifest.clusters, max(memory.moving_slots, 2 * open_clusters(manifest, compute)))
        self._number: int | None = None  # of the `Reserve` that is to be answered
        self.vacates = True  # slots beyond the plan's may hold clusters of an earlier cache process
        self._requested_s: float | None = None
        self.slots: PartCounts = (memory.trigger_slots, memory.value_slots)

    def reserve(self, number: int | None, reserved_bytes: int) -> None:
        """Set the bytes to be reserved.

        number: number of the `Reserve` message, for `answer`; None: no answer is due
        """
        self._number, self._reserved_bytes = number, reserved_bytes

    def withhold(self, withheld_bytes: int) -> bool:
        """Set the bytes that slots give back while memory is short. Return True if they differ from before."""
        changed = withheld_bytes != self._withheld_bytes
        self._withheld_bytes = withheld_bytes
        return changed

    def begin(self) -> PartCounts:
        """Compute and return the numbers of slots from now on. If there are fewer than before, `vacates` becomes
        True."""
        before, memory = self.slots, self._memory
        triggers, values = memory.trigger_slots, memory.value_slots
        if memory.has_borrowed_slots:
            borrowed = usable_borrowed_slots(memory, self._lendable, self._reserved_bytes)
            triggers, values = triggers + borrowed[0], values + borrowed[1]
        minimum = min(self.min_slots, triggers), min(self.min_slots, values)
        self.slots = reclaim_slots(
            (triggers, values), self._withheld_bytes, self._slot_bytes, min_slots=minimum, in_pairs=self._alike
        )
        if any(now < then for now, then in zip(self.slots, before, strict=True)):
            self.vacates, self._requested_s = True, None
        return self.slots

    def trim_requested(self, now_s: float) -> None:
        """Record that the slots are empty and `Trim` was sent to the loader."""
        self._requested_s = now_s

    def is_trim_requested(self, now_s: float) -> bool:
        """Return True if `Trim` was sent. If its answer is overdue, the state becomes steady as if it had come."""
        if self._requested_s is not None and now_s - self._requested_s > GIVE_UP_AFTER_S:
            self.trimmed()
        return self._requested_s is not None

    def restarted(self) -> None:
        """Forget the request to the loader, which was reset or replaced."""
        self._requested_s = None

    def trimmed(self) -> None:
        """Record that the loader has freed the memory."""
        self.vacates = False

    def answer(self) -> int | None:
        """Return the number of the `Reserve` to answer, once; None if there is none."""
        number, self._number = self._number, None
        return number
