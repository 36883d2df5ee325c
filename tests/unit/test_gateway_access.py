"""Who is let in, at the one ASGI application around all others: keys, and pages of other sites."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from neuronpipe.protocol.errors import UserError
from neuronpipe.services.gateway.http.access_control import AccessControl
from neuronpipe.services.gateway.http.memory_account import MemoryAccount
from neuronpipe.services.gateway.http.metrics import Metrics
from neuronpipe.services.runtime.listener import Listener, checked_origins

KEY = "0123456789abcdef"
PAGE = "https://chat.example.org"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}


async def _inner(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def asked(
    headers: dict[str, str], *, origins: tuple[str, ...] = (), key: str | None = None, method: str = "POST"
) -> tuple[int, dict[str, str]]:
    """Status and headers of the answer."""
    listener = Listener(descriptor=-1, host="127.0.0.1", port=1, key=key, origins=origins)
    app = AccessControl(_inner, listener, Metrics(), frozenset(), MemoryAccount())
    given = [(name.encode(), value.encode()) for name, value in ({"host": "localhost:1"} | headers).items()]
    path = "/v1/completions"
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": given,
    }
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


def test_no_page_of_another_site_is_let_in_unless_its_origin_is_named() -> None:
    assert asked({"origin": PAGE})[0] == 403
    assert asked(PREFLIGHT, method="OPTIONS")[0] == 403
    assert asked({"origin": "https://other.example.org"}, origins=(PAGE,))[0] == 403
    status, headers = asked({"origin": PAGE}, origins=(PAGE, "https://third.example.org"))
    assert status == 200
    assert headers["access-control-allow-origin"] == PAGE
    assert headers["vary"] == "Origin"


def test_a_browser_that_asks_before_a_request_is_answered_without_a_key() -> None:
    status, headers = asked(PREFLIGHT, origins=(PAGE,), key=KEY, method="OPTIONS")
    assert status == 204
    assert headers["access-control-allow-origin"] == PAGE
    assert "POST" in headers["access-control-allow-methods"]
    assert headers["access-control-allow-headers"] == "authorization, content-type"
    status, headers = asked({"origin": PAGE}, origins=(PAGE,), key=KEY)
    assert status == 401
    assert headers["access-control-allow-origin"] == PAGE, "the page may read why"
    assert asked({"origin": PAGE, "authorization": f"Bearer {KEY}"}, origins=(PAGE,), key=KEY)[0] == 200


def test_any_origin_is_any_and_credentials_never_come_along() -> None:
    for origins in (("*",), (PAGE,), ("*", PAGE)):
        for headers, method in ((PREFLIGHT, "OPTIONS"), ({"origin": PAGE}, "POST")):
            status, answer = asked(headers, origins=origins, method=method)
            assert status in (200, 204)
            assert answer["access-control-allow-origin"] == ("*" if "*" in origins else PAGE)
            assert "access-control-allow-credentials" not in answer


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost", 200),
        ("https://localhost:3000", 200),
        ("http://127.0.0.1:5173", 200),
        ("http://[::1]:8", 200),
        ("http://localhost.example.org", 403),
        ("http://notlocalhost:3000", 403),
        ("http://localhost@example.org", 403),
        ("file://localhost", 403),
        ("http://[", 403),
        ("null", 403),
    ],
)
def test_pages_of_this_machine_are_let_in_at_any_port_where_that_is_said(origin: str, status: int) -> None:
    found, headers = asked({"origin": origin}, origins=("localhost",))
    assert found == status
    assert headers.get("access-control-allow-origin") == (origin if status == 200 else None)
    assert headers["vary"] == "Origin"


def test_nothing_is_said_of_other_sites_where_none_may_come() -> None:
    for headers in ({}, {"origin": "http://localhost:1"}):
        assert not [name for name in asked(headers)[1] if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": f"Bearer {KEY}"}, 200),
        ({"x-api-key": KEY}, 200),
        ({"authorization": "Basic eDp5", "x-api-key": KEY}, 200),
        ({"authorization": "Bearer wrong", "x-api-key": KEY}, 401),
        ({"x-api-key": KEY + "x"}, 401),
        ({"x-api-key": ""}, 401),
        ({}, 401),
    ],
)
def test_a_key_comes_in_one_of_two_headers(headers: dict[str, str], status: int) -> None:
    assert asked(headers, key=KEY)[0] == status


@pytest.mark.parametrize(
    "origin", ["*", "localhost", "http://localhost:3000", "https://chat.example.org", "app://obsidian.md"]
)
def test_an_origin_is_written_as_browsers_send_it(origin: str) -> None:
    assert checked_origins([origin]) == (origin,)


@pytest.mark.parametrize(
    "origin",
    ["chat.example.org", "https://chat.example.org/", "https://Chat.example.org", "https://a@b.c", "null", "http://["],
)
def test_what_no_browser_sends_is_no_origin(origin: str) -> None:
    with pytest.raises(UserError, match="expected an origin like"):
        checked_origins([origin])
