"""The mailbox of one HTTP request: messages of the run that its response has not read yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.messages.client import Refused
from neuronpipe.services.gateway.http.api_errors import from_refusal
from neuronpipe.services.gateway.http.memory_account import MemoryCharge, message_bytes

MAX_WAITING_BYTES = 512 << 10  # of a stream whose client does not read


class Mailbox:
    """Messages that have arrived for one HTTP request, each with the number of its sequence.

    charge: the memory charge of the HTTP request; waiting messages count towards it
    blocked: True while the client does not read what is sent to it
    overflow: called when a blocked client has more than MAX_WAITING_BYTES waiting or the memory account is full
    can_wait: True once a sequence was accepted or queued; then a busy run makes it wait instead of refusing it
    """

    def __init__(self) -> None:
        self.can_wait = False
        self.charge: MemoryCharge | None = None
        self.blocked = False
        self.overflow: Callable[[], object] = lambda: None
        self._messages: list[tuple[int, Message]] = []
        self._waiting_bytes = 0
        self._waiter: asyncio.Future[None] | None = None

    def put(self, number: int, message: Message) -> None:
        self._messages.append((number, message))
        if self.charge is not None:
            self._count(message_bytes(message), self.charge)
        self._wake()

    def _count(self, more_bytes: int, charge: MemoryCharge) -> None:
        fits = charge.account.has_room(more_bytes, charge)
        self._waiting_bytes += more_bytes
        charge.set(charge.held_bytes + more_bytes)
        if self.blocked and (not fits or self._waiting_bytes > MAX_WAITING_BYTES):
            self.overflow()

    async def take(self, within_s: float | None = None) -> list[tuple[int, Message]]:
        """Return all messages; wait for the first, at most within_s seconds (None: without limit).

        Raises ApiError if a sequence was refused.
        """
        if not self._messages:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = None if within_s is None else loop.call_later(within_s, self._wake)
            try:
                await self._waiter
            finally:
                if timer is not None:
                    timer.cancel()
        messages, self._messages = self._messages, []
        if self.charge is not None:
            self.charge.set(self.charge.held_bytes - self._waiting_bytes)
        self._waiting_bytes = 0
        for _, message in messages:
            if isinstance(message, Refused):
                raise from_refusal(message)
        return messages

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
