"""The HTTP server: uvicorn, with limits on idle and slow connections, and an announced end.

Limited are the number of connections, how long a head may take to arrive, its size, what waits unread on either side,
and how long what is sent may wait for a reader. Where there are too many connections, those go first that have been
without a request for longest. What connections hold counts in the account of all requests.
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
READ_BYTES = 16 << 10  # at once from a connection: 2,700 chunks of a byte take 10 ms
WRITE_BYTES = 32 << 10  # that wait for a reader before a stream waits too; the kernel holds SEND_BUFFER_BYTES more
SEND_BUFFER_BYTES = 64 << 10
FREE_LINE_ENDS, BYTES_PER_LINE_END = (
    4096,
    64,
)  # of a body in chunks: each chunk has two, and costs as much as a kilobyte
ABORT_KEY = "neuronpipe.abort"
REQUEST_ID = b"x-request-id"
_SANE_ID = re.compile(rb"[!-~]{1,128}")
TOO_MANY_CONNECTIONS = unavailable("too_many_connections", f"{MAX_CONNECTIONS} connections are open already; try again")


class SleepingServer(uvicorn.Server):
    """uvicorn's server without its tick of ten times a second: it sleeps until it is told to end.

    signals: those that end it, which were blocked until now. ending: called on the event loop when one comes
    """

    def __init__(self, config: uvicorn.Config, signals: Iterable[signal.Signals], ending: Callable[[], None]) -> None:
        super().__init__(config)
        self._signals, self._ending = list(signals), ending
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()

    async def main_loop(self) -> None:
        """Serve until `end`, or a signal: those that came before are taken now."""
        self._loop = asyncio.get_running_loop()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        if not self.should_exit:
            await self._ended.wait()

    def end(self) -> None:
        """End it, from the event loop."""
        self.should_exit = True
        self._ended.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come."""
        super().handle_exit(sig, frame)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._handle_signal)

    def _handle_signal(self) -> None:
        self._ending()
        self._ended.set()


class BoundedProtocol(H11Protocol):
    """One connection.

    uvicorn's option `http` takes any protocol; this is its own with limits that it has no options for. Of that one it
    uses what asyncio calls, and `connections`, `cycle`, `conn`, `handle_events`, `send_400_response` and
    `timeout_keep_alive_handler`, which uvicorn does not promise to keep: tests/integration/test_gateway_manners.py
    notices when one of them has changed.
    """

    def __init__(self, account: MemoryAccount, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_due: asyncio.TimerHandle | None = None
        self._stalled_due: asyncio.TimerHandle | None = None
        self._unread, self._unsent = MemoryCharge(account), MemoryCharge(account)
        self._idle_since = self.loop.time()
        self._in_chunks, self._chunked_bytes, self._line_ends = False, 0, 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse connections beyond the limit where none is idle; the others have a while to send a request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BYTES)
        if hasattr(transport, "max_size"):  # asyncio's own transport reads 256 KiB at once otherwise
            transport.max_size = READ_BYTES
        with contextlib.suppress(OSError):  # it may be gone already
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if len(self.connections) > MAX_CONNECTIONS and not self._end_longest_idle():
            self._refuse(TOO_MANY_CONNECTIONS)
            return
        self._head_due = self.loop.call_later(HEAD_S, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """Timers and charges go with the connection."""
        for timer in (self._head_due, self._stalled_due):
            if timer is not None:
                timer.cancel()
        self._unread.set(0)
        self._unsent.set(0)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what cannot be handled yet: the beginning of a head, requests behind the one under way. A body in
        chunks of a few bytes ends its connection."""
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
        """True while no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _end_longest_idle(self) -> bool:
        """End the connection that has been without a request for longest; one with an answer still to be read last."""
        idle = [one for one in self.connections if one is not self and isinstance(one, BoundedProtocol) and one.is_idle]
        if not idle:
            return False
        ended = min(idle, key=lambda one: (one.transport.get_write_buffer_size() > 0, one._idle_since))
        self.connections.discard(ended)
        ended.transport.abort()
        return True

    def _refuse(self, problem: ApiError) -> None:
        self.transport.write(_encoded_response(problem))
        self.transport.close()

    def on_response_complete(self) -> None:
        """It is idle from now on, unless the next request has come already."""
        self._idle_since = self.loop.time()
        super().on_response_complete()
        self._unread.set(len(self.conn.trailing_data[0]))

    def handle_events(self) -> None:
        """A head that has begun must be whole in time; between two requests uvicorn's own limit holds."""
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
        """What came is not HTTP. Where an answer has begun, its end says so."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(_encoded_response(ApiError(400, "invalid_http", f"this is not HTTP/1.1: {msg}")))
        self.transport.close()

    def pause_writing(self) -> None:
        """More waits for the reader than is kept: it has a while to read."""
        super().pause_writing()
        self._unsent.set(self.transport.get_write_buffer_size())
        self._stalled_due = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It took some."""
        if self._stalled_due is not None:
            self._stalled_due.cancel()
        self._unsent.set(0)
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Idle for too long; what was sent and never taken is dropped in the end."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(STALLED_S, self.transport.abort)

    def _too_slow(self) -> None:
        self._head_due = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


def request_id(given: bytes | None = None) -> bytes:
    """What a request is called in its answer: as the client calls it, or by a name of our own."""
    return given if given is not None and _SANE_ID.fullmatch(given) else f"req_{os.urandom(12).hex()}".encode()


def _encoded_response(problem: ApiError) -> bytes:
    """A response, after which the connection closes."""
    body = problem.body()
    headers = [
        *problem.headers,
        (REQUEST_ID.decode(), request_id().decode()),
        ("content-type", "application/json"),
        ("content-length", str(len(body))),
    ]
    lines = "".join(f"{name}: {value}\r\n" for name, value in [*headers, ("connection", "close")])
    return f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}\r\n{lines}\r\n".encode() + body
