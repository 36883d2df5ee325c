"""The time between two runs of `serve`: how long it waits, and what clients get meanwhile.

A run ends when one of its processes exceeds its restart budget. If the cause was temporary, for instance lack of
memory, the next run may serve well. If it was a defect, starting again at once would only load the machine. So each
wait is twice the previous one, up to MAX_WAIT_S; a run that lasts STEADY_S resets it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer

from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.runtime.listener import Listener

MIN_WAIT_S, MAX_WAIT_S = 1.0, 60.0
STEADY_S = 300.0
CLIENT_S = 1.0  # to read a request: other clients wait behind it
MAX_BODY_BYTES = 64 << 10  # read before the answer: closing a connection with unread bytes would lose it


class Backoff:
    """The wait before the next run.

    runs_ended: number of runs that have ended so far
    """

    def __init__(self) -> None:
        self.runs_ended = 0
        self._next_s = MIN_WAIT_S

    def after(self, duration_s: float) -> float:
        """Return the seconds to wait after a run that lasted `duration_s`."""
        self.runs_ended += 1
        if duration_s >= STEADY_S:
            self._next_s = MIN_WAIT_S
        wait_s, self._next_s = self._next_s, min(MAX_WAIT_S, 2 * self._next_s)
        return wait_s


def refuse_for(listener: Listener, wait_s: float, reason: str, clock: Callable[[], float] = time.monotonic) -> None:
    """Answer requests at the listener with status 503, the reason and when to try again, for `wait_s` seconds."""
    end = clock() + wait_s

    class Refusal(BaseHTTPRequestHandler):
        """The answer to any method and any path; HEAD gets no body."""

        timeout = CLIENT_S

        def __getattr__(self, name: str) -> Callable[[], None]:
            if name.startswith("do_"):
                return self._refuse
            raise AttributeError(name)

        def _refuse(self) -> None:
            length = self.headers.get("content-length", "")
            self.rfile.read(min(int(length), MAX_BODY_BYTES) if length.isdecimal() else 0)
            problem = _restarting(reason, end - clock())
            body = problem.body()
            self.send_response(problem.status)
            for header, value in (*problem.headers, ("content-type", "application/json"), ("connection", "close")):
                self.send_header(header, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Log nothing: the end of the run was reported once."""

    server = HTTPServer((listener.host, listener.port), Refusal, bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=socket.dup(listener.descriptor))
    server.handle_error = lambda *_: None  # type: ignore[method-assign] # a client that left
    try:
        while (left_s := end - clock()) > 0:
            server.timeout = left_s
            server.handle_request()
    finally:
        server.server_close()


def _restarting(reason: str, left_s: float) -> ApiError:
    message = f"the run has ended and is started again in {max(0.0, left_s):.0f} s: {reason}"
    return ApiError(503, "restarting", message, kind="server_error", retry_after_s=left_s)
