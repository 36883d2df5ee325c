"""The slots of recurrent states: which one a step reads, which one it writes, and snapshots that several may read.

A layer without keys and values carries a state from token to token, which cannot be rewound. A step reads the state
before its first token in one slot and writes the state after its last token to another, so that a step that is sent
again finds what it read before. KV slot n has the state slots 2n and 2n + 1, which its steps write in turn. The other
slots are snapshots: the last two steps of a prompt write there, also the states within the last one, and later requests
with the same beginning go on from the longest snapshot of it.

    state slot                      written by
    2n, 2n + 1                      steps of the sequence on KV slot n, except those below
    snapshot, least recently used   one of the last two steps of a prompt

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
    slots: number of state slots; 0: no layer is recurrent
    """

    def __init__(self, sequences: int, slots: int) -> None:
        self._own_slots = STATES_PER_SEQUENCE * sequences
        self.are_used = slots > 0
        self._snapshots = [
            Snapshot(slot, (), "") for slot in range(self._own_slots, slots)
        ]  # least recently used first

    def target(self, kv_slot: int, source: int) -> int:
        """Return the slot that a step of this KV slot writes, if it reads the state in `source`."""
        first = STATES_PER_SEQUENCE * kv_slot
        return first + (source == first)

    def snapshot_target(self, read: Iterable[int]) -> int | None:
        """Return the slot of the least recently used snapshot, for a step that writes a new one; None if there is none.

        read: slots that active sequences go on from, which stay
        """
        read_slots = set(read)
        for place, snapshot in enumerate(self._snapshots):
            if snapshot.slot not in read_slots:
                self._snapshots[place] = Snapshot(snapshot.slot, (), "")
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
