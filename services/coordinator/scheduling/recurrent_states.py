"""The slots of recurrent states: which one a step reads, which one it writes, and snapshots that several may read.

A layer without keys and values carries a state from token to token, which cannot be rewound. A step reads the state
before its first token in one slot and writes the state after its last token to another, so that a step that is sent
again finds what it read before. KV slot n has the state slots 2n and 2n + 1, which its steps write in turn. A step with
drafted tokens writes a state after each token, since only some of them may be accepted. The other slots are snapshots:
the last two steps of a prompt write there, also the states within the last one, and later requests with the same
beginning go on from the longest snapshot of it.

    state slot                      written by
    2n, 2n + 1                      steps of the sequence on KV slot n, except those below
    draft slot                      a step with drafted tokens, of any sequence
    snapshot, least recently used   one of the last two steps of a prompt

A draft slot whose state is the last one of a sequence that has ended is a snapshot until a step with drafted tokens
needs the slot.

A state is named by its slot. Whoever reads it must check that the slot still holds it: `holds`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from neuronpipe.native import lib
from neuronpipe.plans.plan.segment_sizes import STATES_PER_SEQUENCE

NO_STATE = int(lib.NP_NO_STATE)  # before position 0


class Snapshot(NamedTuple):
    """A state after these tokens, computed in one numerics."""

    slot: int
    tokens: tuple[int, ...]
    numerics: str


class States:
    """The state slots of a run. Pure: it decides on slots and touches no memory.

    sequences: number of KV slots
    slots: number of state slots; 0: no layer has a state
    draft_tokens: maximum of drafted tokens in a step, which is the number of draft slots
    """

    def __init__(self, sequences: int, slots: int, draft_tokens: int = 0) -> None:
        self._own_slots = STATES_PER_SEQUENCE * sequences
        self._draft_slots = range(self._own_slots, min(slots, self._own_slots + draft_tokens))
        self.are_used = slots > 0
        self._snapshots = [
            Snapshot(slot, (), "") for slot in range(self._own_slots, slots)
        ]  # least recently used first

    def target(self, kv_slot: int, source: int) -> int:
        """Return the slot that a step of this KV slot writes, if it reads the state in `source`."""
        first = STATES_PER_SEQUENCE * kv_slot
        return first + (source == first)

    def draft_targets(self, kv_slot: int, source: int, read: Iterable[int]) -> list[int]:
        """Return the slots that a step with drafted tokens of this KV slot may write, in the order of its tokens.

        A step with fewer tokens writes the last ones of them. So the state after the last token is in a slot of the
        sequence, where it stays when the sequence has ended.

        source: the slot that the step reads
        read: slots that active sequences go on from, which stay
        """
        first, last = STATES_PER_SEQUENCE * kv_slot, self.target(kv_slot, source)
        free_slots = [slot for slot in range(first, first + STATES_PER_SEQUENCE) if slot not in (source, last)]
        read_slots = {source, *read}
        return [*free_slots, *(slot for slot in self._draft_slots if slot not in read_slots), last]

    def overwritten(self, slots: Iterable[int]) -> None:
        """Note that a step is about to write these slots: they are no snapshots of what they held."""
        for place, snapshot in enumerate(self._snapshots):
            if snapshot.slot in slots:
                self._snapshots[place] = Snapshot(snapshot.slot, (), "")

    def snapshot_target(self, read: Iterable[int]) -> int | None:
        """Return the slot of the least recently used snapshot, for a step that writes a new one; None if there is none.

        read: slots that active sequences go on from, which stay
        """
        unusable = {*read, *self._draft_slots}
        for snapshot in self._snapshots:
            if snapshot.slot not in unusable:
                self.overwritten((snapshot.slot,))
                return snapshot.slot
        return None

    def is_snapshot(self, slot: int) -> bool:
        return slot >= self._own_slots

    def written(self, slot: int, tokens: list[int], numerics: str) -> None:
        """Note that a snapshot slot has the state after these tokens. Slots of sequences need no note."""
        if self.is_snapshot(slot):
            self._snapshots = [snapshot for snapshot in self._snapshots if snapshot.slot != slot]
            self._snapshots.append(Snapshot(slot, tuple(tokens), numerics))

    def snapshots_of(self, tokens: list[int], numerics: str) -> list[Snapshot]:
        """Return all snapshots of prefixes of these tokens."""
        return [
            snapshot
            for snapshot in self._snapshots
            if snapshot.tokens
            and snapshot.numerics == numerics
            and [*snapshot.tokens] == tokens[: len(snapshot.tokens)]
        ]

    def holds(self, slot: int, tokens: list[int], numerics: str) -> bool:
        """Return True if a slot that had the state after these tokens still has it."""
        if slot == NO_STATE or not self.is_snapshot(slot):
            return slot != NO_STATE
        return Snapshot(slot, tuple(tokens), numerics) in self._snapshots

    def longest(self, tokens: list[int], limit_tokens: int, numerics: str) -> Snapshot | None:
        """Return the longest snapshot of a prefix of `tokens` with at most `limit_tokens`, and mark it as used; None if
        there is none."""
        usable = self.snapshots_of(tokens[:limit_tokens], numerics)
        best = max(usable, key=lambda snapshot: len(snapshot.tokens), default=None)
        if best is not None:
            self._snapshots.remove(best)
            self._snapshots.append(best)
        return best
