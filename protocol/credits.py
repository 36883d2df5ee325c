"""Credits: how many requests each peer has accepted and not answered, which keeps queues short."""

from __future__ import annotations


class Credits:
    """The number of outstanding requests of each peer, which never exceeds the `slots` in its `Hello`."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._outstanding: dict[str, int] = {}

    def announce(self, peer: str, slots: int) -> None:
        """Set the slots of a peer that starts or has restarted, and its outstanding requests to 0."""
        self._slots[peer] = slots
        self._outstanding[peer] = 0

    def take(self, peer: str) -> bool:
        """Count one more request. Return False, and count nothing, if the peer has no free slot or is unknown."""
        if self.free(peer) <= 0:
            return False
        self._outstanding[peer] += 1
        return True

    def give_back(self, peer: str) -> None:
        """Count an answer; ignore one without an outstanding request."""
        if self._outstanding.get(peer, 0) > 0:
            self._outstanding[peer] -= 1

    def forget(self, peer: str) -> None:
        self._slots.pop(peer, None)
        self._outstanding.pop(peer, None)

    def outstanding(self, peer: str) -> int:
        return self._outstanding.get(peer, 0)

    def free(self, peer: str) -> int:
        """Return how many more requests the peer accepts now; 0 for an unknown peer."""
        return self._slots.get(peer, 0) - self.outstanding(peer)
