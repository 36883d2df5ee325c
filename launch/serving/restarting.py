"""Between two runs of `serve`: how long it waits before it starts another, and what clients hear meanwhile.

A run ends when one of its processes dies more often than the supervisor starts it again. Where that was a storm of
kills, by the system for want of memory, say, the next run is served as if nothing had been. Where it is a defect,
starting at once and for ever would only use up the machine. So each wait is twice the one before, until a run has
lasted.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer

from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.runtime.listener import Listener

FIRST_S, MOST_S = 1.0, 60.0
STEADY_S = 300.0  # a run that was served for so long owes nothing to the ones before it
CLIENT_S = 1.0  # for a request: others wait behind it
MAX_BODY_BYTES = 64 << 10  # read before the answer: a connection that is closed with bytes unread loses it


class Backoff:
    """How long to wait before the next run. Pure."""

    def __init__(self) -> None:
        self.runs_ended = 0
        self._next_s = FIRST_S

    def after(self, lasted_s: float) -> float:
        """Seconds to wait, now that a run has ended which was served for so long."""
        self.runs_ended += 1
        if lasted_s >= STEADY_S:
            self._next_s = FIRST_S
        wait_s, self._next_s = self._next_s, min(MOST_S, 2 * self._next_s)
        return wait_s


def refuse_for(listener: Listener, seconds: float, why: str, clock: Callable[[], float] = time.monotonic) -> None:
    """Answer whoever comes to the listener's socket with 503, the reason and when to try again, for so long."""
    end = clock() + seconds

    class Refusal(BaseHTTPRequestHandler):
        """Any method, any path: there is no run. A HEAD gets no body."""

        timeout = CLIENT_S

        def __getattr__(self, name: str) -> Callable[[], None]:
            if name.startswith("do_"):
                return self._refuse
            raise AttributeError(name)

        def _refuse(self) -> None:
            length = self.headers.get("content-length", "")
            self.rfile.read(min(int(length), MAX_BODY_BYTES) if length.isdecimal() else 0)
            problem = _problem(why, end - clock())
            body = problem.body()
            self.send_response(problem.status)
            for header, value in (*problem.headers, ("content-type", "application/json"), ("connection", "close")):
                self.send_header(header, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing: it is said once that the run has ended."""

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


def _problem(why: str, left_s: float) -> ApiError:
    message = f"the run has ended and is started again in {max(0.0, left_s):.0f} s: {why}"
    return ApiError(503, "restarting", message, kind="server_error", retry_after_s=left_s)
