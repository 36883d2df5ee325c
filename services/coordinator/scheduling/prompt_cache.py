"""The prompt cache on disk as the scheduler sees it: which KV slots the loader saves and restores.

    state of a KV slot           event                                        next
    its prompt is computed, or   the loader has a prompt cache                `Save`; the slot is held
    its sequence has ended
    held                         a request keeps all held tokens              taken
    held                         a request needs a slot, and all are held     `Hasten`; the request waits
    held                         `Saved`, or the loader is lost               not held
    its prompt is to be          memory has MIN_TOKENS less of the prompt     `Restore`, once; meanwhile no prompt is
    computed                                                                  computed
    being restored               `Restored`, or the loader is lost            the rest of the prompt is computed

A held slot is free, but its held tokens are not overwritten. Saved tokens are the same whoever computes them, so a
sequence that goes on from them may keep its slot while it is saved. This module has no sockets and no clock.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

from neuronpipe.protocol.messages.loader import Hasten, Restore, Save
from neuronpipe.services.coordinator.scheduling.events import ProcessKey, UsePromptCache
from neuronpipe.services.coordinator.scheduling.prefix_reuse import SlotContent
from neuronpipe.services.coordinator.scheduling.recurrent_states import NO_STATE, States
from neuronpipe.services.coordinator.scheduling.sequences import Generation

LOADER: ProcessKey = ("loader", 0)
MIN_TOKENS = 64  # fewer are computed sooner than a request for them is answered


class _Saving(NamedTuple):
    slot: int
    tokens: int
    state_slots: tuple[int, ...]


class _Restoring(NamedTuple):
    number: int
    sequence: Generation
    numerics: str
    state: int


class PromptCache:
    """The saves and the restore that are under way.

    serves: True while the loader is ready and has a prompt cache
    """

    def __init__(self, states: States) -> None:
        self.serves = False
        self._states = states
        self._restoring: _Restoring | None = None
        self._number = 0  # of the last `Save` or `Restore`
        self._saving: dict[int, _Saving] = {}  # by the number of the `Save`
        self._hastened = 0  # number of the last save that was hastened
        self._actions: list[UsePromptCache] = []

    @property
    def awaited(self) -> str | None:
        """The message whose answer a request waits for; None if no request waits for any."""
        if self._restoring is not None:
            return "Restore"
        return "Save" if any(number <= self._hastened for number in self._saving) else None

    def take_actions(self) -> list[UsePromptCache]:
        """Return the actions since the previous call."""
        actions, self._actions = self._actions, []
        return actions

    def lost(self) -> None:
        """Note that the loader has ended: nothing is saved or restored any more."""
        self.serves, self._restoring = False, None
        self._saving.clear()
        self._actions.clear()

    # ---- saving ----------------------------------------------------------------------------------------------
    def save(self, slot: int, content: SlotContent) -> None:
        """Have the beginning of a slot's content saved, if it was computed in one numerics and is long enough.

        The tokens that are saved must stay in the slot as long as `held_tokens` names them.
        """
        if not self.serves or not content.provenance.runs:
            return
        end, numerics = content.provenance.runs[0]
        tokens = content.tokens[:end]
        if len(tokens) < MIN_TOKENS:
            return
        self._number += 1
        snapshots = self._states.snapshots_of(tokens, numerics)
        state_slots = tuple(snapshot.slot for snapshot in snapshots)
        self._saving[self._number] = _Saving(slot, len(tokens), state_slots)
        message = Save(
            number=self._number,
            sequence=slot,
            numerics=numerics,
            tokens=_packed(tokens),
            state_slots=state_slots,
            state_tokens=tuple(len(snapshot.tokens) for snapshot in snapshots),
        )
        self._actions.append(UsePromptCache(message))

    def saved(self, number: int) -> None:
        """Process the loader's answer to a `Save`."""
        self._saving.pop(number, None)

    def held_tokens(self) -> Mapping[int, int]:
        """Return for each slot that is being saved the number of tokens that must stay in it."""
        tokens_of: dict[int, int] = {}
        for slot, tokens, _ in self._saving.values():
            tokens_of[slot] = max(tokens_of.get(slot, 0), tokens)
        return tokens_of

    def held_states(self) -> list[int]:
        """Return the state slots that are being saved, which must stay as they are."""
        return [slot for saving in self._saving.values() for slot in saving.state_slots]

    def hasten(self) -> None:
        """Have the saves end soon, since a request waits for a slot."""
        last = max(self._saving, default=0)
        if last > self._hastened:
            self._hastened = last
            self._actions.append(UsePromptCache(Hasten(number=last)))

    # ---- restoring -------------------------------------------------------------------------------------------
    @property
    def restoring(self) -> Generation | None:
        """The sequence whose slot is being restored; None if no slot is."""
        return None if self._restoring is None else self._restoring.sequence

    def may_restore(self, sequence: Generation) -> bool:
        """Return True if the loader may be asked for the sequence's prompt, which happens once."""
        return self.serves and self._restoring is None and sequence.may_restore and sequence.ask.share_prefix

    def restore(self, sequence: Generation, numerics: str, available: int) -> UsePromptCache:
        """Return the action that restores a sequence's slot, whose memory is reserved."""
        self._number += 1
        state_to = self._states.target(sequence.slot, sequence.state) if self._states.are_used else None
        state = NO_STATE if state_to is None else state_to
        self._restoring, sequence.may_restore = _Restoring(self._number, sequence, numerics, state), False
        # The state after the whole prompt is of no use: its last token must be computed for its logits.
        end = sequence.prompt_tokens - (state_to is not None)
        message = Restore(
            number=self._number,
            sequence=sequence.slot,
            numerics=numerics,
            tokens=_packed(sequence.tokens[:end]),
            first=sequence.computed_tokens,
            min_tokens=available + MIN_TOKENS,
            state_to=state_to,
        )
        return UsePromptCache(message)

    def restored(self, number: int, tokens: int) -> None:
        """Process the loader's answer to a `Restore`."""
        if self._restoring is not None and self._restoring.number == number:
            (_, sequence, numerics, state), self._restoring = self._restoring, None
            sequence.restored(tokens, numerics, state)


def _packed(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)
