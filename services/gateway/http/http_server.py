"""The HTTP server: uvicorn with limits on connections, and without its periodic tick.

There are limits on the number of connections, on the size of a request's head and the time for it to arrive, on
buffered bytes in both directions, and on the time that a client may take to read. If there are too many connections,
the one that has been idle for longest is closed. Buffered bytes count in the memory account of all requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
from collections.abc import Callable, Iterable, MutableMapping
from email.utils import formatdate
from http import HTTPStatus
from types import FrameType
from typing import Any, cast

import uvicorn
from neuronpipe.services.gateway.http.api_errors import ApiError, unavailable
from neuronpipe.services.gateway.http.memory_account import MemoryAccount, MemoryCharge
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 512
HEAD_S = 5.0
MAX_HEAD_BYTES = 32 << 10
STALLED_S = 10.0
READ_BYTES = 16 << 10  # per read; bounds the work of one event loop iteration (2,700 chunks of one byte: 10 ms)
WRITE_BYTES = 32 << 10  # buffered before a stream waits for its client; the kernel buffers SEND_BUFFER_BYTES more
SEND_BUFFER_BYTES = 64 << 10
# Limit on small chunks of a chunked body: a chunk has two line ends and costs as much time as a kilobyte.
FREE_LINE_ENDS, BYTES_PER_LINE_END = 4096, 64
ABORT_KEY = "neuronpipe.abort"
REQUEST_ID = b"x-request-id"
_SANE_ID = re.compile(rb"[!-~]{1,128}")
TOO_MANY_CONNECTIONS = unavailable("too_many_connections", f"{MAX_CONNECTIONS} connections are open already; try again")


class SleepingServer(uvicorn.Server):
    """uvicorn's server without its tick ten times a second: it sleeps until `end` is called or a signal arrives.

    signals: the signals that end it; blocked by the caller until the server runs
    ending: called on the event loop when a signal arrives
    """

    def __init__(self, config: uvicorn.Config, signals: Iterable[signal.Signals], ending: Callable[[], None]) -> None:
        super().__init__(config)
        self._signals, self._ending = list(signals), ending
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()

    async def main_loop(self) -> None:
        """Serve until `end` is called or a signal arrives; signals that arrived while they were blocked count."""
        self._loop = asyncio.get_running_loop()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        if not self.should_exit:
            await self._ended.wait()

    def end(self) -> None:
        """End the server. Must be called on the event loop."""
        self.should_exit = True
        self._ended.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._handle_signal)

    def _handle_signal(self) -> None:
        self._ending()
        self._ended.set()


class BoundedProtocol(H11Protocol):
    """One connection: uvicorn's protocol for h11, with limits for which uvicorn has no options.

    It relies on attributes that uvicorn does not document: `connections`, `cycle`, `conn`, `handle_events`,
    `send_400_response` and `timeout_keep_alive_handler`. tests/integration/test_gateway_manners.py fails when one of
    them changes.
    """

    def __init__(self, account: MemoryAccount, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_due: asyncio.TimerHandle | None = None
        self._stalled_due: asyncio.TimerHandle | None = None
        self._unread, self._unsent = MemoryCharge(account), MemoryCharge(account)
        self._idle_since = self.loop.time()
        self._in_chunks, self._chunked_bytes, self._line_ends = False, 0, 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the first request; refuse the connection if there are too many and none is idle."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BYTES)
        if hasattr(transport, "max_size"):  # by default asyncio's own transport reads 256 KiB at once
            transport.max_size = READ_BYTES
        with contextlib.suppress(OSError):  # the connection may be closed already
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if len(self.connections) > MAX_CONNECTIONS and not self._end_longest_idle():
            self._refuse(TOO_MANY_CONNECTIONS)
            return
        self._head_due = self.loop.call_later(HEAD_S, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_due, self._stalled_due):
            if timer is not None:
                timer.cancel()
        self._unread.set(0)
        self._unsent.set(0)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Charge bytes that cannot be handled yet: an incomplete head, and pipelined requests.

        A body in chunks of a few bytes ends its connection.
        """
        if self._in_chunks:
            self._chunked_bytes += len(data)
            self._line_ends += data.count(b"\r\n")
            if self._line_ends > FREE_LINE_ENDS + self._chunked_bytes // BYTES_PER_LINE_END:
                self.transport.abort()
                return
        super().data_received(data)
        try:
            self._unread.grow(len(self.conn.trailing_data[0]) - self._unread.held_bytes)
        except ApiError as problem:
            if self.is_idle:
                self._refuse(problem)
            else:
                self.transport.abort()

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _end_longest_idle(self) -> bool:
        """Close the connection that has been idle for longest; those with unsent bytes come last.

        Returns False if no connection is idle.
        """
        protocols = [
            protocol for protocol in self.connections if protocol is not self and isinstance(protocol, BoundedProtocol)
        ]
        idle = [protocol for protocol in protocols if protocol.is_idle]
        if not idle:
            return False
        oldest = min(idle, key=lambda protocol: (protocol.transport.get_write_buffer_size() > 0, protocol._idle_since))
        self.connections.discard(oldest)
        oldest.transport.abort()
        return True

    def _refuse(self, problem: ApiError) -> None:
        self.transport.write(_encoded_response(problem))
        self.transport.close()

    def on_response_complete(self) -> None:
        """Note when the connection becomes idle, and charge the bytes of the next request."""
        self._idle_since = self.loop.time()
        super().on_response_complete()
        self._unread.set(len(self.conn.trailing_data[0]))

    def handle_events(self) -> None:
        """Update the timer for an incomplete head, and the state of a chunked body, after uvicorn handled what arrived.

        Between two requests uvicorn's keep-alive limit applies.
        """
        self.server_state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        super().handle_events()
        waiting = self.is_idle
        if waiting:
            self._in_chunks = False
        elif not self._in_chunks and any(name == b"transfer-encoding" for name, _ in self.cycle.scope["headers"]):
            self._in_chunks, self._chunked_bytes, self._line_ends = True, 0, 0
        if not waiting:
            cast(MutableMapping[str, Any], self.cycle.scope)[ABORT_KEY] = self.transport.abort
        if not waiting and self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None
        elif waiting and self._head_due is None and self.conn.trailing_data[0]:
            self._head_due = self.loop.call_later(HEAD_S, self._too_slow)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP with an error; if a response has begun, only close the connection."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(_encoded_response(ApiError(400, "invalid_http", f"this is not HTTP/1.1: {msg}")))
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unsent.set(self.transport.get_write_buffer_size())
        self._stalled_due = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stalled_due is not None:
            self._stalled_due.cancel()
        self._unsent.set(0)
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle for too long; abort it if its client does not read the last bytes."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(STALLED_S, self.transport.abort)

    def _too_slow(self) -> None:
        self._head_due = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


def request_id(client_id: bytes | None = None) -> bytes:
    """Return the id of a request: the client's own if it is valid, else a new one."""
    if client_id is not None and _SANE_ID.fullmatch(client_id):
        return client_id
    return f"req_{os.urandom(12).hex()}".encode()


def _encoded_response(problem: ApiError) -> bytes:
    """Return the bytes of a whole error response that closes the connection."""
    body = problem.body()
    headers = [
        *problem.headers,
        (REQUEST_ID.decode(), request_id().decode()),
        ("content-type", "application/json"),
        ("content-length", str(len(body))),
    ]
    lines = "".join(f"{name}: {value}\r\n" for name, value in [*headers, ("connection", "close")])
    return f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}\r\n{lines}\r\n".encode() + body
