"""Whose text gets a KV slot, which one, and whose keys and values it can begin with.

Owners of requests have equal shares of the tokens that are computed, and about that of the slots: who asks for much
delays only themselves.

Keys and values of a position follow from the tokens up to it and from the numerics that computed them, so what one text
computed is what another one with the same beginning needs, if a run of its own would compute it in the same numerics.
A slot keeps its content after its text has ended, until another text takes it: the slot that was used least recently,
so that a conversation finds its last turn again. Content that no request used for `FORGET_AFTER_S` is forgotten when
the next prompt has been computed, so that its memory is lent to weights while that request decodes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

FORGET_AFTER_S = 600.0  # a person who reads and answers comes back sooner


@dataclasses.dataclass
class Provenance:
    """Which numerics computed a text's keys and values: `runs` of positions, each (end, numerics), ascending."""

    runs: list[tuple[int, str]] = dataclasses.field(default_factory=list)

    def computed(self, first: int, end: int, numerics: str) -> None:
        """The positions [first, end) are computed now, and nothing after them is there. Nothing before `first` is
        missing."""
        runs = [(min(old_end, first), old) for old_end, old in self.runs]
        runs = [run for n, run in enumerate(runs) if run[0] > (runs[n - 1][0] if n else 0)]
        if runs and runs[-1][1] == numerics:
            runs.pop()
        self.runs = [*runs, (end, numerics)]

    def tokens_of(self, numerics: str) -> int:
        """Length of the beginning that this numerics alone computed."""
        return self.runs[0][0] if self.runs and self.runs[0][1] == numerics else 0


class SlotContent(NamedTuple):
    """What a slot holds: tokens whose keys and values are there, and who computed those."""

    tokens: list[int]
    provenance: Provenance

    def shared_in(self, numerics: str) -> list[int]:
        """The beginning that a run in this numerics would have computed alike."""
        return self.tokens[: self.provenance.tokens_of(numerics)]


class TakenSlot(NamedTuple):
    """A slot for a new text, and how many of its tokens have keys and values there already."""

    slot: int
    kept_tokens: int


class Match(NamedTuple):
    """The slot that shares the longest beginning with a text, and the length of that."""

    slot: int
    tokens: int


def common_tokens(first: list[int], second: list[int]) -> int:
    """Length of the common beginning. Halving compares slices: far fewer turns than tokens."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def longest_match(tokens: list[int], contents: Mapping[int, list[int]]) -> Match | None:
    """The slot with the longest beginning of `tokens`, the first one of equals; None where nothing is shared. The last
    token never counts: it has to be computed for its logits."""
    matches = [Match(slot, common_tokens(tokens[:-1], content)) for slot, content in contents.items()]
    best = max(matches, key=lambda match: match.tokens, default=None)
    return best if best is not None and best.tokens else None


class FreeSlots:
    """The slots without a text, least recently used first, and what each still holds."""

    def __init__(self, count: int) -> None:
        self._contents = {slot: SlotContent([], Provenance()) for slot in range(count)}  # in order of last use
        self._used_at_s = [0.0] * count  # when a request last computed or shared what a slot holds

    def __len__(self) -> int:
        return len(self._contents)

    def tokens(self) -> dict[int, int]:
        """By free slot how many tokens it holds."""
        return {slot: len(content.tokens) for slot, content in self._contents.items()}

    def shared_in(self, numerics: str) -> dict[int, list[int]]:
        """By free slot the tokens whose keys and values a run in this numerics would have computed alike."""
        return {slot: content.shared_in(numerics) for slot, content in self._contents.items()}

    def take(self, tokens: list[int], numerics: str, *, shares: bool = True) -> TakenSlot | None:
        """A slot for a text that begins with these tokens and is computed in this numerics, free no more; None when
        there is none.

        The slot with the longest match is taken itself where the text goes on with at least half of what it holds.
        Otherwise more would be lost than shared: the slot used least recently is taken (a copy can be made into it).
        """
        if not self._contents:
            return None
        slot = next(iter(self._contents))
        match = longest_match(tokens, self.shared_in(numerics)) if shares else None
        if match is not None and 2 * match.tokens >= len(self._contents[match.slot].tokens):
            slot = match.slot
        content = self._contents.pop(slot).shared_in(numerics)
        return TakenSlot(slot, common_tokens(tokens[:-1], content) if shares else 0)

    def give_back(self, slot: int, content: SlotContent, now: float) -> None:
        """A text has ended; its keys and values stay in its slot."""
        self._contents[slot] = content
        self._used_at_s[slot] = now

    def touch(self, slot: int, now: float) -> None:
        """A slot's content was of use. A slot that is not free is passed over."""
        if slot in self._contents:
            self.give_back(slot, self._contents.pop(slot), now)

    def forget_unused(self, now: float) -> None:
        """Empty the slots whose content no request used for `FORGET_AFTER_S` seconds. Such slots come first in the
        order of last use, and stay there."""
        for slot in self._contents:
            if now - self._used_at_s[slot] >= FORGET_AFTER_S:
                self._contents[slot] = SlotContent([], Provenance())


Owner = tuple[bytes, str]
"""(client, `owner` of its requests)"""


class Shares:
    """How many tokens were computed for each owner, as far as it matters for the others: who comes anew has no
    advantage of the time before, and who had more than the others has to wait until they had as much."""

    def __init__(self) -> None:
        self._ended: dict[Owner, int] = {}  # tokens of texts that have ended

    def came(self, owner: Owner, present: Mapping[Owner, int]) -> None:
        """An owner asks for something. present: of the owners that wait or have slots, tokens of texts with slots."""
        if not present:
            self._ended.clear()
        least = min((self._total(one, present) for one in present), default=0)
        if owner not in present:
            self._ended[owner] = max(self._ended.get(owner, 0), least)
        # Who has gone without a debt would begin like this too: nothing need be known of them.
        gone = [one for one, tokens in self._ended.items() if one not in present and one != owner and tokens <= least]
        for one in gone:
            del self._ended[one]

    def ended(self, owner: Owner, tokens: int) -> None:
        """A text with a slot has ended, for which so many tokens were computed."""
        self._ended[owner] = self._ended.get(owner, 0) + tokens

    def next(self, waiting: Iterable[Owner], slots: Counter[Owner], present: Mapping[Owner, int], count: int) -> int:
        """Which of those that wait, in order of arrival, comes next: the one for whom the fewest tokens were computed;
        who has more than an equal share of the `count` slots comes after the others, so that nobody is without one for
        long."""
        order, share = list(waiting), count / len(present)
        return min(range(len(order)), key=lambda n: (slots[order[n]] > share, self._total(order[n], present), n))

    def _total(self, owner: Owner, present: Mapping[Owner, int]) -> int:
        return self._ended.get(owner, 0) + present.get(owner, 0)
