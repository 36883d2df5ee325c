"""The HTTP server: uvicorn, with limits on idle and slow connections, and an announced end.

Limited are the number of connections, how long a head may take to arrive, its size, and how long what is sent may wait
for a reader.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import signal
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from types import FrameType
from typing import Any

from neuronpipe.services.gateway.problems import Problem, unavailable
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 512
HEAD_S = 5.0
MAX_HEAD_BYTES = 32 << 10
STALLED_S = 30.0
REQUEST_ID = b"x-request-id"
_SANE_ID = re.compile(rb"[!-~]{1,128}")
CROWDED = unavailable("too_many_connections", f"{MAX_CONNECTIONS} connections are open already; try again")


def announcing(signals: Iterable[signal.Signals], ending: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    """For uvicorn's option `callback_notify`, whose first call comes when the server has started: from then on `ending`
    is called when the server is told to end, by `signals` that waited until now. uvicorn acts on them as well."""
    waiting = list(signals)

    async def started() -> None:
        loop = asyncio.get_running_loop()
        for number in waiting:
            theirs = signal.getsignal(number)
            assert callable(theirs)
            signal.signal(number, functools.partial(_told, theirs, loop, ending))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, waiting)
        waiting.clear()  # uvicorn calls again now and then

    return started


def _told(
    theirs: Callable[[int, FrameType | None], object],
    loop: asyncio.AbstractEventLoop,
    ending: Callable[[], None],
    number: int,
    frame: FrameType | None,
) -> None:
    loop.call_soon_threadsafe(ending)
    theirs(number, frame)


class BoundedProtocol(H11Protocol):
    """One connection.

    uvicorn's option `http` takes any protocol; this is its own with limits that it has no options for. Of that one it
    uses what asyncio calls, and `connections`, `cycle`, `conn`, `handle_events`, `send_400_response` and
    `timeout_keep_alive_handler`, which uvicorn does not promise to keep: tests/integration/test_gateway_manners.py
    notices when one of them has changed.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_due: asyncio.TimerHandle | None = None
        self._stalled_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse connections beyond the limit; the others have a while to send a request."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.write(_whole(CROWDED))
            transport.close()
            return
        self._head_due = self.loop.call_later(HEAD_S, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """The timer goes with the connection."""
        for timer in (self._head_due, self._stalled_due):
            if timer is not None:
                timer.cancel()
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

    def send_400_response(self, msg: str) -> None:
        """What came is not HTTP. Where an answer has begun, its end says so."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(_whole(Problem(400, "invalid_http", f"this is not HTTP/1.1: {msg}")))
        self.transport.close()

    def pause_writing(self) -> None:
        """More waits for the reader than is kept: it has a while to read."""
        super().pause_writing()
        self._stalled_due = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It took some."""
        if self._stalled_due is not None:
            self._stalled_due.cancel()
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


def _whole(problem: Problem) -> bytes:
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
