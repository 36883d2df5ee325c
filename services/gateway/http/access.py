"""Which requests are let in: one ASGI application around all others.

    Host      on loopback without a key it must name loopback, or a web page could reach us by a name of its own choice
    Origin    a page from elsewhere may not ask, whatever the method, unless --cors names its origin
    key       where there is one, everything but the page itself and /health asks for it

A page whose origin is named may read answers, and its browser's questions before a request (preflights) are answered
here. It is never said that cookies and the like may come along: there are none.

Every response says that it is not to be guessed at, framed or kept, has the request's id, and is counted.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from neuronpipe.protocol.errors import quoted
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.http.http_server import MAX_HEAD_BYTES, REQUEST_ID, request_id
from neuronpipe.services.gateway.http.memory_account import SCOPE_KEY, MemoryAccount
from neuronpipe.services.gateway.http.metrics import Metrics
from neuronpipe.services.runtime.listener import (
    ALL_ORIGINS,
    KEY_VARIABLE,
    LOCAL_ORIGINS,
    LOOPBACK_NAMES,
    Listener,
    is_loopback,
)
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = ("/", "/health")
PAGE_PREFIX = "/page/"
MAX_HEADERS = 128
HEADER_BYTES = 512  # that a header takes beside its characters
CLOSE_HEADER = (("connection", "close"),)
KEY_HEADER = "x-api-key"
PREFLIGHT_S = 600
EXPOSED_HEADERS = b"x-request-id, retry-after"
RESPONSE_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class AccessControl:
    """Checks every request before the application sees it."""

    def __init__(
        self, app: ASGIApp, listener: Listener, metrics: Metrics, paths: frozenset[str], account: MemoryAccount
    ) -> None:
        self._app, self._metrics, self._paths, self._account = app, metrics, paths, account
        self._key = None if listener.key is None else listener.key.encode()
        self._cors = Cors(listener.origins)
        self._loopback_only = self._key is None and is_loopback(listener.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let in, or refuse."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"
        own = [(REQUEST_ID, request_id(dict(scope["headers"]).get(REQUEST_ID))), *self._cors.headers(scope)]

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._metrics.responded(path, message["status"])
                message["headers"] = [*message["headers"], *RESPONSE_HEADERS, *own]
            await send(message)

        with self._account.charge() as charge:
            scope[SCOPE_KEY] = charge
            try:
                charge.grow(_head_bytes(scope) + HEADER_BYTES * len(scope["headers"]))
                self._check(scope)
            except ApiError as problem:
                await respond(problem)(scope, receive, counted)
            else:
                preflight = self._cors.preflight(scope)
                await (preflight or self._app)(scope, receive, counted)

    def _check(self, scope: Scope) -> None:
        if len(scope["headers"]) > MAX_HEADERS:
            raise ApiError(431, "head_too_large", f"more than {MAX_HEADERS} headers", headers=CLOSE_HEADER)
        if _head_bytes(scope) > MAX_HEAD_BYTES:
            raise ApiError(431, "head_too_large", f"more than {MAX_HEAD_BYTES} bytes of headers", headers=CLOSE_HEADER)
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            # A proxy in front may take the other one for the body's end: what follows would be another's request.
            said = "Content-Length and Transfer-Encoding: a request has one of the two"
            raise ApiError(400, "invalid_http", said, headers=CLOSE_HEADER)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if self._loopback_only and _host_name(host) not in LOOPBACK_NAMES:
            said = (
                f"host {quoted(host)}: without a key this server answers to localhost alone; "
                f"start it with --key or {KEY_VARIABLE} and send the key to reach it by any name"
            )
            raise ApiError(403, "host_not_allowed", said)
        origin = headers.get("origin")
        if origin is not None and _host_and_port(origin) != host and not self._cors.allows(origin):
            said = f"origin {quoted(origin)}: pages from elsewhere may not use this server"
            raise ApiError(403, "origin_not_allowed", said)
        if self._key is None or scope["path"] in OPEN_PATHS or scope["path"].startswith(PAGE_PREFIX):
            return
        if self._cors.preflight(scope) is not None:
            return  # browsers ask without a key whether they may send it
        given = sent_key(headers)
        if given is None or not hmac.compare_digest(given.encode(), self._key):
            raise ApiError(
                401,
                "invalid_api_key",
                "a key is needed: send the header `Authorization: Bearer KEY`, or `X-Api-Key: KEY`",
                headers=(("www-authenticate", "Bearer"),),
            )


class Cors:
    """What pages of other sites may do: those of these origins use the API, no others."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origins)

    def allows(self, origin: str) -> bool:
        """Whether its pages may ask."""
        if LOCAL_ORIGINS in self._origins and _is_local(origin):
            return True
        return ALL_ORIGINS in self._origins or origin in self._origins

    def headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Of the response: whose pages may read it. A response that depends on who asks says so."""
        if not self._origins:
            return []
        vary = [] if ALL_ORIGINS in self._origins else [(b"vary", b"Origin")]
        origin = _header(scope, b"origin")
        if origin is None or not self.allows(origin):
            return vary
        allowed = ALL_ORIGINS if ALL_ORIGINS in self._origins else origin
        return [
            *vary,
            (b"access-control-allow-origin", allowed.encode("latin-1")),
            (b"access-control-expose-headers", EXPOSED_HEADERS),
        ]

    def preflight(self, scope: Scope) -> Response | None:
        """The answer to a browser that asks whether a page of an allowed origin may send a request; None for every
        other request."""
        origin, wanted = _header(scope, b"origin"), _header(scope, b"access-control-request-method")
        if scope["method"] != "OPTIONS" or wanted is None or origin is None or not self.allows(origin):
            return None
        headers = {
            "access-control-allow-methods": "GET, POST, OPTIONS",
            "access-control-allow-headers": _header(scope, b"access-control-request-headers") or "content-type",
            "access-control-max-age": str(PREFLIGHT_S),
        }
        return Response(status_code=204, headers=headers)


def _head_bytes(scope: Scope) -> int:
    head_bytes = len(scope["raw_path"]) + len(scope["query_string"])
    return head_bytes + sum(len(name) + len(value) for name, value in scope["headers"])


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for header, value in scope["headers"] if header == name), None)


def _host_and_port(origin: str) -> str | None:
    """Host and port of an origin; None of what is none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _is_local(origin: str) -> bool:
    """Whether it is of a page that this machine serves, at whatever port."""
    try:
        parts = urlsplit(origin)
        return parts.scheme in ("http", "https") and parts.hostname in LOOPBACK_NAMES
    except ValueError:
        return False


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def respond(problem: ApiError) -> Response:
    """A problem as a response."""
    return Response(problem.body(), problem.status, headers=dict(problem.headers), media_type="application/json")


def sent_key(headers: Mapping[str, str]) -> str | None:
    """The key that a request sends: `Authorization: Bearer KEY`, or `X-Api-Key: KEY`."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return given.strip()
    return headers.get(KEY_HEADER)


def client_of(request: Request, user: str | None) -> str:
    """A name for whom this request is asked, as far as a fair share of the run goes: an address with the key that it
    sends, needed or not, and with the name that the body gives its user. It says nothing of the key. Whoever makes up
    names gets more shares: a share is a courtesy among clients that are let in."""
    address = request.client.host if request.client is not None else ""
    who = "\0".join((address, sent_key(request.headers) or "", user or ""))
    return hashlib.blake2s(who.encode(errors="replace"), digest_size=8).hexdigest()
