"""HTTP connections that cannot be held for nothing: uvicorn's protocol with a limit to their number, to how long a head
may take to arrive, and to its size."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 512
HEAD_S = 10.0
MOST_HEAD_BYTES = 32 << 10
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(H11Protocol):
    """One connection."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Turn away one too many; give the others a while to say what they want."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.write(BUSY)
            transport.close()
            return
        self._head_due = self.loop.call_later(HEAD_S, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """The timer goes with the connection."""
        if self._head_due is not None:
            self._head_due.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """A head that has begun must be whole in time; between two requests uvicorn's own limit holds."""
        super().handle_events()
        waiting = self.cycle is None or self.cycle.response_complete
        if not waiting and self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None
        elif waiting and self._head_due is None and self.conn.trailing_data[0]:
            self._head_due = self.loop.call_later(HEAD_S, self._too_slow)

    def _too_slow(self) -> None:
        self._head_due = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()
