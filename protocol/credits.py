"""Credits: how many requests each peer has taken and not answered, so that queues stay short by agreement."""

from __future__ import annotations


class Credits:
    """The sender's side of the count. A peer announces its slots in `Hello`; no more than that are outstanding."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._outstanding: dict[str, int] = {}

    def announce(self, peer: str, slots: int) -> None:
        """The peer (again) takes `slots` requests at once, and owes no answer."""
        self._slots[peer] = slots
        self._outstanding[peer] = 0

    def take(self, peer: str) -> bool:
        """Count one more request; False, and nothing is counted, when the peer has no free slot or is unknown."""
        if self.free(peer) <= 0:
            return False
        self._outstanding[peer] += 1
        return True

    def give_back(self, peer: str) -> None:
        """The peer answered one request; an answer to nothing is passed over."""
        if self._outstanding.get(peer, 0) > 0:
            self._outstanding[peer] -= 1

    def forget(self, peer: str) -> None:
        """The peer is gone, and its requests with it."""
        self._slots.pop(peer, None)
        self._outstanding.pop(peer, None)

    def outstanding(self, peer: str) -> int:
        """Requests the peer has not answered."""
        return self._outstanding.get(peer, 0)

    def free(self, peer: str) -> int:
        """Requests the peer takes before it has answered another one."""
        return self._slots.get(peer, 0) - self.outstanding(peer)
