"""Which requests are let in: one ASGI application around all others.

    Host      on loopback without a key it must name loopback, or a web page could reach us by a name of its own choice
    Origin    a page from elsewhere may not ask, whatever the method (there is no CORS)
    key       where there is one, everything but the page itself and /health asks for it

Every response says that it is not to be guessed at, framed or kept, has the request's id, and is counted.
"""

from __future__ import annotations

import hmac
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import urlsplit

from neuronpipe.services.gateway.http_server import MAX_HEAD_BYTES, REQUEST_ID, request_id
from neuronpipe.services.gateway.listener import KEY_VARIABLE, LOOPBACK_NAMES, Listener, is_loopback
from neuronpipe.services.gateway.metrics import Metrics
from neuronpipe.services.gateway.problems import Problem, quoted
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN = ("/", "/health")
PAGE = "/page/"
HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class AccessControl:
    """Checks every request before the application sees it."""

    def __init__(self, app: ASGIApp, listener: Listener, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths
        self._key = None if listener.key is None else listener.key.encode()
        self._loopback_only = self._key is None and is_loopback(listener.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let in, or refuse."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"
        own = (REQUEST_ID, request_id(dict(scope["headers"]).get(REQUEST_ID)))

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._metrics.responded(path, message["status"])
                message["headers"] = [*message["headers"], *HEADERS, own]
            await send(message)

        try:
            self._check(scope)
        except Problem as problem:
            await respond(problem)(scope, receive, counted)
        else:
            await self._app(scope, receive, counted)

    def _check(self, scope: Scope) -> None:
        head_bytes = len(scope["raw_path"]) + len(scope["query_string"])
        if head_bytes + sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEAD_BYTES:
            close = (("connection", "close"),)
            raise Problem(431, "head_too_large", f"more than {MAX_HEAD_BYTES} bytes of headers", headers=close)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if self._loopback_only and _name(host) not in LOOPBACK_NAMES:
            said = (
                f"host {quoted(host)}: without a key this server answers to localhost alone; "
                f"start it with --key or {KEY_VARIABLE} and send the key to reach it by any name"
            )
            raise Problem(403, "host_not_allowed", said)
        origin = headers.get("origin")
        if origin is not None and _place(origin) != host:
            said = f"origin {quoted(origin)}: pages from elsewhere may not use this server"
            raise Problem(403, "origin_not_allowed", said)
        if self._key is None or scope["path"] in OPEN or scope["path"].startswith(PAGE):
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._key):
            raise Problem(
                401,
                "invalid_api_key",
                "a key is needed: send the header `Authorization: Bearer KEY`",
                headers=(("www-authenticate", "Bearer"),),
            )


def _place(origin: str) -> str | None:
    """Host and port of an origin; None of what is none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def respond(problem: Problem) -> Response:
    """A problem as a response."""
    return Response(problem.body(), problem.status, headers=dict(problem.headers), media_type="application/json")
