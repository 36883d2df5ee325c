"""A queue that is fair to clients, and within a client to its requests: the client with the fewest texts at the
coordinator sends the next one, and its requests take turns. The texts of one request stay in order."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Generic, TypeVar

Owner = TypeVar("Owner")
Item = TypeVar("Item")


class FairQueue(Generic[Owner, Item]):
    """Items that wait, by their owners, and those by the clients they are of. What was taken counts for its client
    until it has ended."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[Owner, deque[Item]]] = {}  # in the order of their turns
        self._client: dict[Owner, str] = {}
        self._taken: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(len(queue) for owners in self._waiting.values() for queue in owners.values())

    def __contains__(self, owner: Owner) -> bool:
        """Whether something of this owner waits."""
        return owner in self._client

    @property
    def next_client_is_idle(self) -> bool:
        """Whether the client whose turn it is has nothing that was taken."""
        client = self._next()
        return client is not None and not self._taken[client]

    def add(self, owner: Owner, items: Iterable[Item], client: str = "") -> None:
        """These wait too, after what the owner has waiting."""
        self._queue(owner, client).extend(items)

    def put_back(self, owner: Owner, item: Item, client: str = "") -> None:
        """It could not be sent after all: it is the owner's next again."""
        self.release(client)
        self._queue(owner, client).appendleft(item)

    def take(self) -> Item | None:
        """The next item of the owner whose turn it is; None when nothing waits."""
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
        """Something of this client that was taken has ended."""
        self._taken[client] -= 1
        if not self._taken[client]:
            del self._taken[client]

    def drop(self, owner: Owner) -> None:
        """Nothing of this owner waits any more."""
        client = self._client.pop(owner, None)
        if client is not None:
            del self._waiting[client][owner]
            if not self._waiting[client]:
                del self._waiting[client]

    def _next(self) -> str | None:
        """The client whose turn it is: among equals the one that has waited longest for its turn."""
        return min(self._waiting, key=lambda client: self._taken[client], default=None)

    def _queue(self, owner: Owner, client: str) -> deque[Item]:
        self._client[owner] = client
        return self._waiting.setdefault(client, {}).setdefault(owner, deque())
