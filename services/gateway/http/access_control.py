"""Access control: the ASGI middleware around the application.

    Host      on loopback without a key it must be a name of loopback; otherwise a web page could reach the server
              through a host name that its author controls (DNS rebinding)
    Origin    requests from pages of other origins are refused, whatever the method, unless --cors names the origin
    key       if the server has one, every request needs it, except for the page, /health and preflight requests
    head      too many or too large headers are refused, and Content-Length together with Transfer-Encoding

Pages of an allowed origin may read responses, and preflight requests of their browsers are answered without the
application. Cookies and other credentials are never allowed, since the server uses none.

Every response gets security headers and the request's id, and is counted in the metrics.
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
HEADER_BYTES = 512  # memory of a parsed header beside its characters
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
    """An ASGI middleware that checks every request before the application sees it."""

    def __init__(
        self, app: ASGIApp, listener: Listener, metrics: Metrics, paths: frozenset[str], account: MemoryAccount
    ) -> None:
        self._app, self._metrics, self._paths, self._account = app, metrics, paths, account
        self._key = None if listener.key is None else listener.key.encode()
        self._cors = Cors(listener.origins)
        self._loopback_only = self._key is None and is_loopback(listener.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an allowed request to the application; answer any other with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"
        request_id_header = (REQUEST_ID, request_id(dict(scope["headers"]).get(REQUEST_ID)))
        request_headers = [request_id_header, *self._cors.headers(scope)]

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._metrics.responded(path, message["status"])
                message["headers"] = [*message["headers"], *RESPONSE_HEADERS, *request_headers]
            await send(message)

        with self._account.charge() as charge:
            scope[SCOPE_KEY] = charge
            try:
                charge.grow(_head_bytes(scope) + HEADER_BYTES * len(scope["headers"]))
                self._check(scope)
            except ApiError as problem:
                await respond(problem, path)(scope, receive, counted)
            else:
                preflight = self._cors.preflight(scope)
                await (preflight or self._app)(scope, receive, counted)

    def _check(self, scope: Scope) -> None:
        if len(scope["headers"]) > MAX_HEADERS:
            raise ApiError(431, "head_too_large", f"more than {MAX_HEADERS} headers", headers=CLOSE_HEADER)
        if _head_bytes(scope) > MAX_HEAD_BYTES:
            raise ApiError(431, "head_too_large", f"more than {MAX_HEAD_BYTES} bytes of headers", headers=CLOSE_HEADER)
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            # Request smuggling: a proxy in front may use the other header to find the end of the body.
            message = "a request must not have both Content-Length and Transfer-Encoding"
            raise ApiError(400, "invalid_http", message, headers=CLOSE_HEADER)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if self._loopback_only and _host_name(host) not in LOOPBACK_NAMES:
            message = (
                f"host {quoted(host)}: without a key this server accepts only the host names of loopback; "
                f"start it with --key or {KEY_VARIABLE} and send the key to reach it by any name"
            )
            raise ApiError(403, "host_not_allowed", message)
        origin = headers.get("origin")
        if origin is not None and _host_and_port(origin) != host and not self._cors.allows(origin):
            message = f"origin {quoted(origin)}: pages of this origin may not use this server; `serve --cors` allows it"
            raise ApiError(403, "origin_not_allowed", message)
        if self._key is None or scope["path"] in OPEN_PATHS or scope["path"].startswith(PAGE_PREFIX):
            return
        if self._cors.preflight(scope) is not None:
            return  # browsers send preflight requests without a key
        key = sent_key(headers)
        if key is None or not hmac.compare_digest(key.encode(), self._key):
            raise ApiError(
                401,
                "invalid_api_key",
                "a key is needed: send the header `Authorization: Bearer KEY`, or `X-Api-Key: KEY`",
                headers=(("www-authenticate", "Bearer"),),
            )


class Cors:
    """The cross-origin policy (CORS): pages of the given origins may use the API."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origins)

    def allows(self, origin: str) -> bool:
        """Return True if pages of this origin may send requests."""
        if LOCAL_ORIGINS in self._origins and _is_local(origin):
            return True
        return ALL_ORIGINS in self._origins or origin in self._origins

    def headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Return the headers that allow pages to read the response, with `Vary` unless all origins are allowed."""
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
        """Return the response to a preflight request of an allowed origin; None for every other request."""
        origin, method = _header(scope, b"origin"), _header(scope, b"access-control-request-method")
        if scope["method"] != "OPTIONS" or method is None or origin is None or not self.allows(origin):
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
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _is_local(origin: str) -> bool:
    """Return True if this machine serves the origin, at any port."""
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


def respond(problem: ApiError, path: str) -> Response:
    """Return the response for an error.

    path: the path of the request, which decides the format
    """
    body, headers = problem.body(path), dict(problem.headers)
    return Response(body, problem.status, headers=headers, media_type="application/json")


def sent_key(headers: Mapping[str, str]) -> str | None:
    """Return the key in `Authorization: Bearer KEY`, else in `X-Api-Key: KEY`; None if there is none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return headers.get(KEY_HEADER)


def client_of(request: Request, user: str | None) -> str:
    """Return the id of the client to which the fair queue counts this request.

    It is a hash of the client's address, the key that it sends (required or not) and `user`, the end user that the
    request names. It does not reveal the key. A client that invents user names gets more shares: fairness is meant for
    clients that cooperate, not as a protection.
    """
    address = request.client.host if request.client is not None else ""
    identity = "\0".join((address, sent_key(request.headers) or "", user or ""))
    return hashlib.blake2s(identity.encode(errors="replace"), digest_size=8).hexdigest()
