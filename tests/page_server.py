"""The page's server, played by a test: it says what it was told to say, as slowly as it was told to."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from neuronpipe.protocol.messages.snapshot import Snapshot
from neuronpipe.services.gateway.application import PAGE_FOLDER, PAGE_HEADERS, PAGE_INDEX
from neuronpipe.services.gateway.http.api_errors import ApiError, unavailable

LIVE_EVERY_S = 0.05
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
}


class Thought(str):
    """A piece of what the model thinks before it answers."""


# What an answer is made of: a piece of text or thought, something to wait for, or the trouble that ends it.
Reply = Sequence[str | threading.Event | ApiError]


class PageServer(ThreadingHTTPServer):
    """Serves the page, a model, and answers.

    asked: the bodies of requests for answers
    replies: what the next answers are; "Fine." when there is none
    models: what is served; asleep: which of these have no run
    template_errors: why the chat templates of these models fail
    chat: whether the models were trained to chat
    reason: why answers end
    snapshot: what is shown of the run, from one moment to the next
    """

    daemon_threads = True
    request_queue_size = 64  # the page asks for all of its files at once; a connection that is dropped comes again late

    def __init__(self, context_tokens: int = 4096) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.context_tokens = context_tokens
        self.asked: list[dict[str, Any]] = []
        self.replies: deque[Reply] = deque()
        self.models, self.asleep = ["a-model"], set[str]()
        self.template_errors: dict[str, str] = {}
        self.chat, self.reason = True, "stop"
        self.snapshot = run_snapshot()
        self.ended = threading.Event()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.server_address[1])

    @property
    def sent(self) -> list[list[str]]:
        """The messages' texts of each request."""
        return [[message["content"] for message in body["messages"]] for body in self.asked]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away is no trouble."""


def run_snapshot(**fields: Any) -> dict[str, Any]:
    """A run that is ready and does nothing; fields are added as they are."""
    idle = Snapshot(
        run="0", model="a-model", mode="exact", quantization="q8", plan="0", at_s=0.0, ready=True, tbt_ms={}
    )
    return dataclasses.asdict(idle) | fields


@contextlib.contextmanager
def page_server(context_tokens: int = 4096) -> Iterator[PageServer]:
    """A server while the context lasts."""
    with PageServer(context_tokens) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path == "/live" and query.removeprefix("model=") in self.server.asleep:
            asleep = unavailable("asleep", "it has no run now")
            self._whole(asleep.status, asleep.body(), "application/json")
        elif path == "/live":
            self._begin("text/event-stream")
            while not self.server.ended.wait(LIVE_EVERY_S):
                self._event(self.server.snapshot | ({"model": query.removeprefix("model=")} if query else {}))
        elif path == "/props":
            error = self.server.template_errors.get(query.removeprefix("model="))
            self._whole(200, json.dumps({"chat_template_error": error}).encode(), "application/json")
        elif self.path == "/v1/models":
            facts = {"chat_template": self.server.chat, "context_tokens": self.server.context_tokens}
            data = [{"id": name} | facts for name in self.server.models]
            self._whole(200, json.dumps({"data": data}).encode(), "application/json")
        else:
            file = PAGE_FOLDER / (self.path.removeprefix("/page/") if self.path != "/" else PAGE_INDEX)
            self._whole(200, file.read_bytes(), TYPES[file.suffix])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        reply = self.server.replies.popleft() if self.server.replies else ("Fine.",)
        if isinstance(reply[0], ApiError):
            self._whole(reply[0].status, reply[0].body(), "application/json")
            return
        self._begin("text/event-stream")
        for part in reply:
            if isinstance(part, str):
                delta = {"reasoning_content" if isinstance(part, Thought) else "content": part}
                self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
            elif isinstance(part, ApiError):
                self._event(json.loads(part.body()))
                return
            else:
                part.wait()
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": self.server.reason}]})
        characters = sum(len(message["content"]) for message in body["messages"])
        self._event({"choices": [], "usage": {"prompt_tokens": characters, "completion_tokens": len(reply)}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _begin(self, kind: str) -> None:
        self.send_response(200)
        for name, value in {**PAGE_HEADERS, "content-type": f"{kind}; charset=utf-8"}.items():
            self.send_header(name, value)
        self.end_headers()

    def _event(self, content: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")

    def _whole(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in {**PAGE_HEADERS, "content-type": kind, "content-length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
