"""A queue that is fair to several owners: they take turns, so that one with many items does not delay the others. The
items of one owner stay in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

Owner = TypeVar("Owner")
Item = TypeVar("Item")


class Turns(Generic[Owner, Item]):
    """Items that wait, by their owners."""

    def __init__(self) -> None:
        self._queues: dict[Owner, deque[Item]] = {}  # in the order of their turns

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __contains__(self, owner: Owner) -> bool:
        """Whether something of this owner waits."""
        return owner in self._queues

    def add(self, owner: Owner, items: Iterable[Item]) -> None:
        """These wait too, after what the owner has waiting."""
        self._queues.setdefault(owner, deque()).extend(items)

    def put_back(self, owner: Owner, item: Item) -> None:
        """It could not be sent after all: it is the owner's next again."""
        self._queues.setdefault(owner, deque()).appendleft(item)

    def take(self) -> Item | None:
        """The next item of the owner whose turn it is; None when nothing waits."""
        for owner, queue in self._queues.items():
            item = queue.popleft()
            del self._queues[owner]
            if queue:
                self._queues[owner] = queue
            return item
        return None

    def drop(self, owner: Owner) -> None:
        """Nothing of this owner waits any more."""
        self._queues.pop(owner, None)
