"""A queue that is fair between clients and, within a client, between its HTTP requests.

The client with the fewest sequences at the coordinator sends the next one, and its HTTP requests alternate. The
sequences of one HTTP request stay in order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Generic, TypeVar

Owner = TypeVar("Owner")
Item = TypeVar("Item")


class FairQueue(Generic[Owner, Item]):
    """Waiting items, grouped by owner (an HTTP request) and by the client of each owner.

    An item that was taken counts against its client until `release` is called for it.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, dict[Owner, deque[Item]]] = {}  # the next owner of a client comes first
        self._client: dict[Owner, str] = {}
        self._taken: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(len(queue) for owners in self._waiting.values() for queue in owners.values())

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._client

    @property
    def next_client_is_idle(self) -> bool:
        """True if an item waits and the client that is next has no taken item that is still unreleased."""
        client = self._next()
        return client is not None and not self._taken[client]

    def add(self, owner: Owner, items: Iterable[Item], client: str = "") -> None:
        """Append items to those of this owner."""
        self._queue(owner, client).extend(items)

    def put_back(self, owner: Owner, item: Item, client: str = "") -> None:
        """Return an item that could not be sent to the front of its owner's queue."""
        self.release(client)
        self._queue(owner, client).appendleft(item)

    def take(self) -> Item | None:
        """Remove and return the next item; None if nothing waits."""
        client = self._next()
        if client is None:
            return None
        owners = self._waiting.pop(client)
        owner = next(iter(owners))
        queue = owners.pop(owner)
        item = queue.popleft()
        if queue:
            owners[owner] = queue
        else:
            del self._client[owner]
        if owners:
            self._waiting[client] = owners
        self._taken[client] += 1
        return item

    def release(self, client: str = "") -> None:
        """Count one taken item of this client as finished."""
        self._taken[client] -= 1
        if not self._taken[client]:
            del self._taken[client]

    def drop(self, owner: Owner) -> None:
        client = self._client.pop(owner, None)
        if client is not None:
            del self._waiting[client][owner]
            if not self._waiting[client]:
                del self._waiting[client]

    def _next(self) -> str | None:
        # Among clients with equally many taken items, the dictionary's order makes it the one that waited longest.
        return min(self._waiting, key=lambda client: self._taken[client], default=None)

    def _queue(self, owner: Owner, client: str) -> deque[Item]:
        self._client[owner] = client
        return self._waiting.setdefault(client, {}).setdefault(owner, deque())
