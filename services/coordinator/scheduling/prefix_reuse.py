"""Assignment of KV slots: fair shares between owners, and reuse of common prefixes.

Owners of requests have equal shares of the computed tokens and roughly of the slots, so that an owner with many
requests delays only itself.

Keys and values of a position depend on the tokens up to it and on the numerics that computed them. A sequence may use
those of another sequence with the same beginning, if its own run would compute them in the same numerics. A slot keeps
its content after its sequence has ended until another sequence takes it: the least recently used slot, so that a
conversation finds its previous turn.

    slot                                 event                                        next
    free, with content                   a request matches half of it, or the slot    taken; only the match stays
                                         is the least recently used
    taken, its prompt is not computed    before a chunk, another slot has more of it  the next `Prefill` copies it
    taken                                the sequence ends                            free, with the tokens of
                                                                                      finished steps
    free, unused for FORGET_AFTER_S      a prompt was computed two seconds ago        empty; weights borrow its memory
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from neuronpipe.services.coordinator.scheduling.recurrent_states import NO_STATE, States

FORGET_AFTER_S = 600.0  # a person who reads and answers comes back sooner
NOTHING_HELD: Mapping[int, int] = {}


@dataclasses.dataclass
class Provenance:
    """The numerics that computed a sequence's keys and values.

    runs: pairs of end position and numerics, ascending; each begins where the previous one ends
    """

    runs: list[tuple[int, str]] = dataclasses.field(default_factory=list)

    def computed(self, first: int, end: int, numerics: str) -> None:
        """Note that the positions [first, end) are computed, and that later positions are void.

        All positions before `first` must have been computed.
        """
        runs = [(min(old_end, first), old) for old_end, old in self.runs]
        runs = [run for n, run in enumerate(runs) if run[0] > (runs[n - 1][0] if n else 0)]
        if runs and runs[-1][1] == numerics:
            runs.pop()
        self.runs = [*runs, (end, numerics)]

    def tokens_of(self, numerics: str) -> int:
        """Return the length of the prefix that was computed in this numerics only."""
        return self.runs[0][0] if self.runs and self.runs[0][1] == numerics else 0


class SlotContent(NamedTuple):
    """The content of a KV slot: the tokens that have keys and values, and their provenance.

    state: the slot of the recurrent state after them
    """

    tokens: list[int]
    provenance: Provenance
    state: int = NO_STATE

    def shared_in(self, numerics: str) -> list[int]:
        """Return the prefix that a run in this numerics would compute identically."""
        return self.tokens[: self.provenance.tokens_of(numerics)]


class TakenSlot(NamedTuple):
    """A slot for a new sequence, how many of the sequence's first tokens have keys and values in it already, and the
    slot of the recurrent state after them."""

    slot: int
    kept_tokens: int
    state: int = NO_STATE


class Match(NamedTuple):
    """The slot with the longest common prefix, the length of that prefix, and the slot of the recurrent state after
    it."""

    slot: int
    tokens: int
    state: int = NO_STATE


def common_tokens(first: list[int], second: list[int]) -> int:
    """Return the length of the common prefix. Bisection with slices takes far fewer iterations than a loop over
    tokens."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def longest_match(tokens: list[int], contents: Mapping[int, list[int]]) -> Match | None:
    """Return the slot with the longest prefix of `tokens`, the first of equals; None if nothing is shared.

    The last token never counts: it must be computed for its logits.
    """
    matches = [Match(slot, common_tokens(tokens[:-1], content)) for slot, content in contents.items()]
    best = max(matches, key=lambda match: match.tokens, default=None)
    return best if best is not None and best.tokens else None


def usable_prefix(
    states: States, tokens: list[int], common: int, content: SlotContent, numerics: str
) -> tuple[int, int]:
    """Return how many tokens of a slot with `common` tokens of a sequence can be reused, and the slot of the state
    after them: fewer than `common` if layers have a state and only an earlier one exists.

    content: the content of the slot
    """
    if not states.are_used or not common:
        return common, NO_STATE
    if common == len(content.tokens) and states.holds(content.state, content.tokens, numerics):
        return common, content.state
    snapshot = states.longest(tokens, common, numerics)
    return (0, NO_STATE) if snapshot is None else (len(snapshot.tokens), snapshot.slot)


class FreeSlots:
    """The slots without a sequence, least recently used first, with their content."""

    def __init__(self, count: int, states: States | None = None) -> None:
        self._states = states or States(count, 0)
        self._contents = {slot: SlotContent([], Provenance()) for slot in range(count)}  # in order of last use
        self._used_at_s = [0.0] * count  # when a request last computed or copied the slot's content

    def __len__(self) -> int:
        return len(self._contents)

    def tokens(self) -> dict[int, int]:
        """Return the number of tokens in each free slot."""
        return {slot: len(content.tokens) for slot, content in self._contents.items()}

    def shared_in(self, numerics: str) -> dict[int, list[int]]:
        """Return for each free slot the tokens that a run in this numerics would compute identically."""
        return {slot: content.shared_in(numerics) for slot, content in self._contents.items()}

    def take(
        self, tokens: list[int], numerics: str, *, shares: bool = True, held: Mapping[int, int] = NOTHING_HELD
    ) -> TakenSlot | None:
        """Take a slot for a sequence that begins with these tokens; None if no slot is free.

        The slot with the longest match is taken if the match is at least half of its content. Otherwise more would be
        lost than shared, and the least recently used slot is taken; the match can be copied into it.

        numerics: numerics in which the sequence will be computed
        shares: False if the sequence may not reuse keys and values
        held: for each slot that is being saved, the number of its first tokens that must not be overwritten
        """
        slot = next((slot for slot in self._contents if slot not in held), None)
        match = longest_match(tokens, self.shared_in(numerics)) if shares else None
        if match is not None and 2 * match.tokens >= len(self._contents[match.slot].tokens):
            slot = match.slot if match.tokens >= held.get(match.slot, 0) else slot
        if slot is None:
            return None
        content = self._contents.pop(slot)
        if not shares:
            return TakenSlot(slot, 0)
        common = common_tokens(tokens[:-1], content.shared_in(numerics))
        return TakenSlot(slot, *usable_prefix(self._states, tokens, common, content, numerics))

    def give_back(self, slot: int, content: SlotContent, now: float) -> None:
        """Free the slot of a sequence that has ended; its keys and values stay, and the recurrent state after them."""
        if len(content.provenance.runs) == 1:
            self._states.written(content.state, content.tokens, content.provenance.runs[0][1])
        self._contents[slot] = content
        self._used_at_s[slot] = now

    def content(self, slot: int) -> SlotContent | None:
        """Return the content of a free slot; None if the slot is taken."""
        return self._contents.get(slot)

    def touch(self, slot: int, now: float) -> None:
        """Mark the content of a slot as used, if the slot is free."""
        if slot in self._contents:
            self._contents[slot] = self._contents.pop(slot)
            self._used_at_s[slot] = now

    def forget_unused(self, now: float, held: Mapping[int, int] = NOTHING_HELD) -> None:
        """Empty the slots that no request has used for `FORGET_AFTER_S`, apart from those that are being saved.

        They come first in the order of last use, and stay there.
        """
        for slot in self._contents:
            if now - self._used_at_s[slot] >= FORGET_AFTER_S and slot not in held:
                self._contents[slot] = SlotContent([], Provenance())


Owner = tuple[bytes, str]
"""(client, `owner` of its requests)"""


class Shares:
    """The number of tokens computed for each owner, as far as it matters for fairness.

    A new owner starts with the minimum of those present, and gains nothing from its absence. An owner with more than
    the others waits until they have caught up.
    """

    def __init__(self) -> None:
        self._ended: dict[Owner, int] = {}  # tokens of sequences that have ended

    def add_request(self, owner: Owner, present: Mapping[Owner, int]) -> None:
        """Note a request of an owner.

        present: the tokens of the active sequences of each owner that waits or has slots
        """
        if not present:
            self._ended.clear()
        min_tokens = min((self._total(present_owner, present) for present_owner in present), default=0)
        if owner not in present:
            self._ended[owner] = max(self._ended.get(owner, 0), min_tokens)
        # An absent owner with no more than the minimum would start at the minimum anyway.
        absent = self._ended.keys() - present.keys() - {owner}
        for absent_owner in absent:
            if self._ended[absent_owner] <= min_tokens:
                del self._ended[absent_owner]

    def ended(self, owner: Owner, tokens: int) -> None:
        """Add the tokens that were computed for a sequence that has ended."""
        self._ended[owner] = self._ended.get(owner, 0) + tokens

    def next(self, waiting: Iterable[Owner], slots: Counter[Owner], present: Mapping[Owner, int], count: int) -> int:
        """Return the index of the waiting request that gets the next slot: that of the owner with the fewest
        computed tokens.

        Owners with more than an equal share of the slots come after the others, so that nobody is without a slot for
        long.

        waiting: owner of each waiting request, in order of arrival
        slots: number of slots that each owner has
        present: as in `add_request`
        count: number of all slots
        """
        order, share = list(waiting), count / len(present)
        return min(range(len(order)), key=lambda n: (slots[order[n]] > share, self._total(order[n], present), n))

    def _total(self, owner: Owner, present: Mapping[Owner, int]) -> int:
        return self._ended.get(owner, 0) + present.get(owner, 0)
