"""The memory that requests in flight may take, in one account that the plan includes.

Counted are heads and pipelined bytes, bodies, what bodies become as Python objects, copies of prompts on their way to
the coordinator, tokens that wait for a slow reader, and answers that are sent whole. What does not fit is refused: with
413 where it is too large by itself, else with 503. A body that is still arriving gives way to a smaller request: large
bodies that are sent slowly keep nobody out.
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
# What a parsed value takes at most, measured over all request models: an item of a list; an object, a list or a field.
ITEM_BYTES, CONTAINER_BYTES = 112, 272
MAX_WIDTH = 4  # bytes of a character as Python stores a text with an emoji in it
CHEAP_ITEMS = 1 << 14  # with fewer separators, those inside of texts are counted too
TOKEN_BYTES, TOP_TOKEN_BYTES = 640, 224  # of a token that waits, and of each likely one beside it
MAX_QUOTES = 200_000  # with more, separators inside of texts are counted too


class MemoryAccount:
    """Bytes that requests hold, and the limit for all of them together. give_back: makes allocators give free memory
    back to the system; called now and then."""

    def __init__(
        self, limit_bytes: int = REQUESTS_BYTES, give_back: Callable[[], object] = lib.np_memory_give_back
    ) -> None:
        self.limit_bytes, self.held_bytes = limit_bytes, 0
        self._arriving: dict[MemoryCharge, Callable[[], None]] = {}
        self._give_back, self._released_bytes = give_back, 0

    def released(self, peak_bytes: int) -> None:
        """A request has ended that held so much. What allocators keep of it would be another's in vain."""
        self._released_bytes += peak_bytes
        if self._released_bytes >= self.limit_bytes // 2:
            self._released_bytes = 0
            self._give_back()

    @contextlib.contextmanager
    def charge(self) -> Iterator[MemoryCharge]:
        """A charge that ends with the context."""
        charge = MemoryCharge(self)
        try:
            yield charge
        finally:
            charge.set(0)
            self.released(charge.peak_bytes)

    def has_room(self, more_bytes: int, charge: MemoryCharge) -> bool:
        """True if `charge` may take so much more; bodies that are still arriving and larger give way first."""
        while self.held_bytes + more_bytes > self.limit_bytes:
            largest = max(self._arriving, key=lambda one: one.held_bytes, default=None)
            if largest is None or largest is charge or largest.held_bytes <= charge.held_bytes + more_bytes:
                return False
            give_way = self._arriving.pop(largest)
            largest.set(0)
            give_way()
        return True

    @contextlib.contextmanager
    def arriving(self, charge: MemoryCharge, give_way: Callable[[], None]) -> Iterator[None]:
        """Meanwhile this charge is of a body that is not complete. give_way: ends it; its bytes count no more."""
        self._arriving[charge] = give_way
        try:
            yield
        finally:
            self._arriving.pop(charge, None)


class MemoryCharge:
    """What one request or connection holds."""

    def __init__(self, account: MemoryAccount) -> None:
        self.account, self.held_bytes, self.peak_bytes = account, 0, 0

    def set(self, held_bytes: int) -> None:
        """Count so many bytes, whether there is room or not: they are held already."""
        self.account.held_bytes += held_bytes - self.held_bytes
        self.held_bytes, self.peak_bytes = held_bytes, max(self.peak_bytes, held_bytes)

    def grow(self, more_bytes: int) -> None:
        """Count so many bytes more. Raises Problem where there is no room for them."""
        if not self.account.has_room(more_bytes, self):
            raise self._refusal(more_bytes)
        self.set(self.held_bytes + more_bytes)

    def _refusal(self, more_bytes: int) -> ApiError:
        limit_bytes = self.account.limit_bytes
        if self.held_bytes + more_bytes > limit_bytes:
            needed = f"it would take {self.held_bytes + more_bytes} bytes of memory"
            return ApiError(413, "request_too_large", f"{needed}, and all requests together may take {limit_bytes}")
        return memory_full(limit_bytes)


def memory_full(limit_bytes: int) -> ApiError:
    """Requests in flight take what they may."""
    said = f"requests under way take the {limit_bytes} bytes of memory that they may; try again"
    return unavailable("memory_full", said)


def charge_of(scope: MutableMapping[str, Any]) -> MemoryCharge:
    """The charge of an ASGI scope's request; where none was opened, one of an account of its own."""
    charge: MemoryCharge = scope.setdefault(SCOPE_KEY, MemoryCharge(MemoryAccount()))
    return charge


def message_bytes(message: Message) -> int:
    """About what a message takes in memory."""
    if isinstance(message, Token):
        return TOKEN_BYTES + 4 * len(message.text) + TOP_TOKEN_BYTES * len(message.top)
    if isinstance(message, Scored):
        return sum(TOKEN_BYTES + TOP_TOKEN_BYTES * len(one.top) for one in message.rated)
    return TOKEN_BYTES + 4 * len(getattr(message, "text", ""))


def parsed_bytes(data: bytes | bytearray) -> int:
    """An upper bound of the memory that a JSON text takes as Python objects, found without parsing it."""
    width = 1 if data.isascii() and b"\\u" not in data else MAX_WIDTH
    items, containers = _separators(data, 0, len(data))
    if items + containers > CHEAP_ITEMS and data.count(b'"') <= MAX_QUOTES:
        items, containers = _separators_outside_texts(data)
    return width * len(data) + ITEM_BYTES * items + CONTAINER_BYTES * containers


def _separators(data: bytes | bytearray, begin: int, end: int) -> tuple[int, int]:
    return data.count(b",", begin, end), sum(data.count(one, begin, end) for one in (b"[", b"{", b":"))


def _separators_outside_texts(data: bytes | bytearray) -> tuple[int, int]:
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
