"""The memory account: a limit on the memory of all requests under way, for which the plan reserves room.

It counts heads and pipelined bytes, bodies, the Python objects that bodies become, copies of prompts on their way to
the coordinator, tokens that wait for a slow client, and responses that are sent whole. A request that does not fit is
refused: with 413 if it is too large by itself, else with 503. A body that is still arriving is aborted for a smaller
request, and for any request whose body has arrived, so that clients that send large bodies slowly, or have left in the
middle of one, cannot block the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from neuronpipe.native import lib
from neuronpipe.plans.plan.memory_budget import REQUESTS_BYTES
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.messages.client import Scored, Token
from neuronpipe.services.gateway.http.api_errors import ApiError, unavailable

SCOPE_KEY = "neuronpipe.charge"
# Upper bounds for parsed values, measured over all request models: an item of a list; an object, a list or a field.
ITEM_BYTES, CONTAINER_BYTES = 112, 272
MAX_WIDTH = 4  # bytes per character of a Python string that contains an emoji
CHEAP_ITEMS = 1 << 14  # up to this number, separators inside strings are counted too, which is faster
TOKEN_BYTES, TOP_TOKEN_BYTES = 640, 224  # of a waiting token, and of each of its top tokens
MAX_QUOTES = 200_000  # with more quotes, separators inside strings are counted too: skipping strings would be slow


class MemoryAccount:
    """The bytes that all requests hold together, and their limit.

    give_back: makes the allocators return free memory to the system; called whenever requests that held half the limit
        in all have ended
    """

    def __init__(
        self, limit_bytes: int = REQUESTS_BYTES, give_back: Callable[[], object] = lib.np_memory_give_back
    ) -> None:
        self.limit_bytes, self.held_bytes = limit_bytes, 0
        self._arriving: dict[MemoryCharge, Callable[[], None]] = {}
        self._give_back, self._released_bytes = give_back, 0

    def released(self, peak_bytes: int) -> None:
        """Count a request that has ended. The allocators may still hold its peak_bytes."""
        self._released_bytes += peak_bytes
        if self._released_bytes >= self.limit_bytes // 2:
            self._released_bytes = 0
            self._give_back()

    @contextlib.contextmanager
    def charge(self) -> Iterator[MemoryCharge]:
        """Open a charge that ends with the context."""
        charge = MemoryCharge(self)
        try:
            yield charge
        finally:
            charge.set(0)
            self.released(charge.peak_bytes)

    def has_room(self, more_bytes: int, charge: MemoryCharge, *, from_larger: bool = True) -> bool:
        """Return True if `charge` may grow by more_bytes, if necessary after aborting bodies that are still arriving.

        from_larger: abort only bodies that are larger than `charge` would be
        """
        limit_bytes = self.limit_bytes - more_bytes
        arriving_bytes = sum(arriving.held_bytes for arriving in self._arriving)
        if not from_larger and self.held_bytes - arriving_bytes > limit_bytes:
            return False  # it would not fit even if all arriving bodies were aborted
        while self.held_bytes > limit_bytes:
            largest = max(self._arriving, key=lambda arriving: arriving.held_bytes, default=None)
            if largest is None or largest is charge:
                return False
            if from_larger and largest.held_bytes <= charge.held_bytes + more_bytes:
                return False
            give_way = self._arriving.pop(largest)
            largest.set(0)
            give_way()
        return True

    @contextlib.contextmanager
    def arriving(self, charge: MemoryCharge, give_way: Callable[[], None]) -> Iterator[None]:
        """Mark a charge, while the context lasts, as that of an incomplete body that may be aborted.

        give_way: called when it is aborted; its bytes are released already
        """
        self._arriving[charge] = give_way
        try:
            yield
        finally:
            self._arriving.pop(charge, None)


class MemoryCharge:
    """The bytes that one request or connection holds.

    has_arrived: True once the body of the request is complete
    """

    def __init__(self, account: MemoryAccount) -> None:
        self.account, self.held_bytes, self.peak_bytes = account, 0, 0
        self.has_arrived = False

    def set(self, held_bytes: int) -> None:
        """Set the bytes of this charge even if there is no room: they are allocated already."""
        self.account.held_bytes += held_bytes - self.held_bytes
        self.held_bytes, self.peak_bytes = held_bytes, max(self.peak_bytes, held_bytes)

    def grow(self, more_bytes: int) -> None:
        """Reserve more_bytes. Raises ApiError if there is no room."""
        if not self.account.has_room(more_bytes, self, from_larger=not self.has_arrived):
            raise self._refusal(more_bytes)
        self.set(self.held_bytes + more_bytes)

    def _refusal(self, more_bytes: int) -> ApiError:
        limit_bytes = self.account.limit_bytes
        if self.held_bytes + more_bytes > limit_bytes:
            message = f"the request would take {self.held_bytes + more_bytes} bytes of memory"
            return ApiError(
                413, "request_too_large", f"{message}; the limit for all requests together is {limit_bytes}"
            )
        return memory_full(limit_bytes)


def memory_full(limit_bytes: int) -> ApiError:
    """Return the error for a request that does not fit beside those under way."""
    return unavailable("memory_full", f"requests under way use all of their {limit_bytes} bytes of memory; try again")


def charge_of(scope: MutableMapping[str, Any]) -> MemoryCharge:
    """Return the charge of an ASGI scope; one of a new account if `AccessControl` has opened none."""
    charge: MemoryCharge = scope.setdefault(SCOPE_KEY, MemoryCharge(MemoryAccount()))
    return charge


def message_bytes(message: Message) -> int:
    """Return an estimate of the memory of a waiting message, in bytes."""
    if isinstance(message, Token):
        return TOKEN_BYTES + 4 * len(message.text) + TOP_TOKEN_BYTES * len(message.top)
    if isinstance(message, Scored):
        return sum(TOKEN_BYTES + TOP_TOKEN_BYTES * len(token.top) for token in message.rated)
    return TOKEN_BYTES + 4 * len(getattr(message, "text", ""))


def parsed_bytes(data: bytes | bytearray) -> int:
    """Return an upper bound of the memory that JSON takes as Python objects, computed without parsing it."""
    width = 1 if data.isascii() and b"\\u" not in data else MAX_WIDTH
    items, containers = _separators(data, 0, len(data))
    if items + containers > CHEAP_ITEMS and data.count(b'"') <= MAX_QUOTES:
        items, containers = _separators_outside_strings(data)
    return width * len(data) + ITEM_BYTES * items + CONTAINER_BYTES * containers


def _separators(data: bytes | bytearray, begin: int, end: int) -> tuple[int, int]:
    return data.count(b",", begin, end), sum(data.count(character, begin, end) for character in (b"[", b"{", b":"))


def _separators_outside_strings(data: bytes | bytearray) -> tuple[int, int]:
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    items = containers = begin = 0
    while begin <= len(plain):
        quote = plain.find(b'"', begin)
        end = len(plain) if quote < 0 else quote
        more_items, more_containers = _separators(plain, begin, end)
        items, containers = items + more_items, containers + more_containers
        closing = plain.find(b'"', end + 1)
        begin = len(plain) + 1 if closing < 0 else closing + 1
    return items, containers
