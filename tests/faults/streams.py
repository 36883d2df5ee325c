"""Texts streamed over HTTP through kills: asked again only where a gateway that died leaves no other way."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.http_client import PATIENCE_S, Server


class Broken(Exception):
    """The connection ended before the text did: the process at its other end is gone."""


class Streamed(NamedTuple):
    """The texts of a request, and how many tokens of its prompt were not computed, if the usage was asked for."""

    texts: tuple[str, ...]
    cached_tokens: int


class Stream:
    """Asks a server for the same over and over. The counts say how often it had to begin anew."""

    def __init__(self, server: Server, **body: Any) -> None:
        self._port = server.port
        self._body = {"temperature": 0, "stream": True, **body}
        self.broken = self.refused = 0

    def __call__(self, seen: Callable[[], None] = lambda: None) -> str:
        """The whole text of the only choice, as `answer` gets it."""
        (text,) = self.answer(seen).texts
        return text

    def answer(self, seen: Callable[[], None] = lambda: None, **more: Any) -> Streamed:
        """The whole texts; `seen` is called with every piece. Raises AssertionError for an error that a client is told,
        and for a broken stream that does not begin as the next one does.

        more: fields of the body, besides those of every request
        """
        body = {**self._body, **more}
        begun = [""] * body.get("n", 1)
        while True:
            texts, cached_tokens = [""] * len(begun), 0
            try:
                for event in self._events(json.dumps(body).encode()):
                    for choice in event["choices"]:
                        texts[choice["index"]] += choice["text"]
                        seen()
                    if usage := event.get("usage"):
                        cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
            except Broken:
                self.broken += 1
                begun = [max(pair, key=len) for pair in zip(begun, texts, strict=True)]
                continue
            for start, text in zip(begun, texts, strict=True):
                assert text.startswith(start), f"{start!r}, then from the start {text!r}"
            return Streamed(tuple(texts), cached_tokens)

    def _events(self, body: bytes) -> Iterator[dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        try:
            yield from self._events_of(connection, body)
        except (ConnectionError, http.client.HTTPException) as error:
            raise Broken from error
        finally:
            connection.close()

    def _events_of(self, connection: http.client.HTTPConnection, body: bytes) -> Iterator[dict[str, Any]]:
        while True:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
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
            yield event
        raise Broken
