"""Which KV slot a text gets, and whose keys and values it can begin with.

Keys and values of a position follow from the tokens up to it and from nothing else, so what one text computed is what
another one with the same beginning needs. A slot keeps its content after its text has ended, until another text takes
it: the slot that was used least recently, so that a conversation finds its last turn again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


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
    """The slots without a text, least recently used first, and the tokens whose keys and values each still holds."""

    def __init__(self, count: int) -> None:
        self._contents: dict[int, list[int]] = {slot: [] for slot in range(count)}  # in order of last use

    @property
    def contents(self) -> Mapping[int, list[int]]:
        """Tokens whose keys and values are in each free slot."""
        return self._contents

    def take(self, tokens: list[int], *, shares: bool = True) -> TakenSlot | None:
        """A slot for a text that begins with these tokens, free no more; None when there is none.

        The slot with the longest match is taken itself where the text goes on with at least half of what it holds.
        Otherwise more would be lost than shared: the slot used least recently is taken (a copy can be made into it).
        """
        if not self._contents:
            return None
        slot = next(iter(self._contents))
        match = longest_match(tokens, self._contents) if shares else None
        if match is not None and 2 * match.tokens >= len(self._contents[match.slot]):
            slot = match.slot
        content = self._contents.pop(slot)
        return TakenSlot(slot, common_tokens(tokens[:-1], content) if shares else 0)

    def give_back(self, slot: int, tokens: list[int]) -> None:
        """A text has ended; keys and values of these tokens stay in its slot."""
        self._contents[slot] = tokens

    def touch(self, slot: int) -> None:
        """A slot's content was of use. A slot that is not free is passed over."""
        if slot in self._contents:
            self._contents[slot] = self._contents.pop(slot)
