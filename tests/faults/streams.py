"""A text streamed over HTTP through kills: asked again only where a gateway that died leaves no other way."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.http_client import PATIENCE_S, Server


class Broken(Exception):
    """The connection ended before the text did: the process at its other end is gone."""


class Stream:
    """Asks a server for the same text over and over. The counts say how often it had to begin anew."""

    def __init__(self, server: Server, **body: Any) -> None:
        self._port = server.port
        self._body = json.dumps({"temperature": 0, "stream": True, **body}).encode()
        self.broken = self.refused = 0

    def __call__(self, seen: Callable[[], None] = lambda: None) -> str:
        """The whole text; `seen` is called with every piece. Raises AssertionError for an error that a client is told,
        and for a broken stream that does not begin as the next one does."""
        begun = ""
        while True:
            text = ""
            try:
                for piece in self._pieces():
                    text += piece
                    seen()
            except Broken:
                self.broken += 1
                begun = max(begun, text, key=len)
                continue
            assert text.startswith(begun), f"{begun!r}, then from the start {text!r}"
            return text

    def _pieces(self) -> Iterator[str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        try:
            yield from self._events(connection)
        except (ConnectionError, http.client.HTTPException) as error:
            raise Broken from error
        finally:
            connection.close()

    def _events(self, connection: http.client.HTTPConnection) -> Iterator[str]:
        while True:
            connection.request("POST", "/v1/completions", self._body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status == 200:
                break
            said = response.read()
            assert response.status == 503, said
            self.refused += 1
            time.sleep(float(response.headers["Retry-After"]))
        for line in response:
            if not line.startswith(b"data: "):
                continue
            if (data := line.removeprefix(b"data: ").strip()) == b"[DONE]":
                return
            event = json.loads(data)
            assert "choices" in event, event
            for choice in event["choices"]:
                yield choice["text"]
        raise Broken
