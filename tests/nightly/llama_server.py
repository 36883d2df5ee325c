"""A replacement for llama.cpp's `llama-server` in its tests: `neuronpipe serve` with the same options and paths.

llama_words.py translates the supported options, requests and answers. Other options are ignored, and other paths
answered with status 501. The model is a small random one with the chat template that the options require, so that
assertions about the text of llama.cpp's test model do not hold.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.nightly.llama_words import Options, Refusal, Translator

MAX_CONTEXT_TOKENS = 8192
PACKAGES = Path(os.environ["NEURONPIPE_LLAMA_PACKAGES"])
NATIVE = ("/completion", "/completions")
COPIED_HEADERS = ("Authorization", "X-Api-Key", "Origin")
CORS_REQUEST_HEADERS = ("Access-Control-Request-Method", "Access-Control-Request-Headers")
CORS = ("access-control-allow-origin", "access-control-allow-headers", "access-control-allow-methods", "vary")


def package(template: str) -> Path:
    """Return a converted random model with this chat template and MAX_CONTEXT_TOKENS, which is cached."""
    folder = PACKAGES / hashlib.sha256(template.encode()).hexdigest()[:16]
    if not folder.exists():
        from dataclasses import replace

        from neuronpipe.plans.convert import convert

        from tests.conformance.checkpoints import TINY, write_checkpoint

        source = PACKAGES / f"source-{os.getpid()}"
        write_checkpoint(source, replace(TINY, context_tokens=MAX_CONTEXT_TOKENS, vocabulary=1000))
        (source / "chat_template.jinja").write_text(template)
        converted = PACKAGES / f"made-{os.getpid()}"
        convert(source, converted, quantization="q8")
        converted.rename(folder)
    return folder


class Neuronpipe:
    """A served run of neuronpipe on a free port."""

    def __init__(self, options: Options) -> None:
        context = min(options.context_tokens, MAX_CONTEXT_TOKENS)
        words = [sys.executable, "-m", "neuronpipe.launch", "serve", str(package(options.template)), "--port", "0"]
        words += ["--json", "--context", str(context), "--sequences", str(options.slots)]
        words += ["--key", options.key] if options.key else []
        words += [word for origin in options.origins for word in ("--cors", origin)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        started = json.loads(self.process.stdout.readline())
        self.port = int(started["address"].rpartition(":")[2])

    def ask(
        self, method: str, path: str, body: Any, headers: dict[str, str], client: socket.socket | None = None
    ) -> tuple[http.client.HTTPResponse, http.client.HTTPConnection]:
        """Send a request and return the open response. client: if this connection closes first, the request ends."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        data = None if body is None else json.dumps(body)
        line.request(method, path, data, {**headers, **({"Content-Type": "application/json"} if data else {})})
        while client and not select.select([line.sock], [], [], 0.05)[0]:
            if select.select([client], [], [], 0)[0] and not client.recv(1, socket.MSG_PEEK):
                line.close()
                raise Refusal(400, "the client hung up")
        return line.getresponse(), line

    def json(
        self, method: str, path: str, body: Any, headers: dict[str, str], client: socket.socket | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Send a request and return the status, the JSON or text, and the headers. client: as in `ask`."""
        response, line = self.ask(method, path, body, headers, client)
        data = response.read()
        line.close()
        try:
            return response.status, json.loads(data), dict(response.getheaders())
        except ValueError:
            return response.status, data.decode(), dict(response.getheaders())


def events(response: http.client.HTTPResponse) -> Iterator[Any]:
    """Yield the objects of a stream of server-sent events."""
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])


class Handler(BaseHTTPRequestHandler):
    """Handles the requests of llama.cpp's tests."""

    protocol_version = "HTTP/1.1"
    backend: Neuronpipe
    translator: Translator

    def do_GET(self) -> None:
        self._serve(None)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length") or 0))
        self._serve(json.loads(data) if data else {})

    def do_OPTIONS(self) -> None:
        status, _, headers = self.backend.json("OPTIONS", "/v1/completions", None, self._sent())
        cors = {name.title(): value for name, value in headers.items() if name.lower() in CORS}
        self._answer(200 if status == 204 else status, None, cors)

    def _sent(self) -> dict[str, str]:
        return {name: self.headers[name] for name in (*COPIED_HEADERS, *CORS_REQUEST_HEADERS) if self.headers[name]}

    def _serve(self, body: Any) -> None:
        path = self.path.partition("?")[0]
        endpoint = path.removeprefix("/v1")
        try:
            if path in NATIVE:
                self._native(body)
            elif endpoint == "/chat/completions/input_tokens":
                self._answer(200, {"input_tokens": len(self._tokens(self._prompt(body)))})
            elif endpoint in ("/chat/completions", "/completions", "/responses"):
                self._as_openai(endpoint, body)
            else:
                self._small(path, endpoint, body)
        except Refusal as refusal:
            self._answer(refusal.status, self.translator.error(refusal.status, refusal.body))

    def _small(self, path: str, endpoint: str, body: Any) -> None:
        if endpoint == "/models":
            return self._answer(200, self.translator.models(self._fetch("GET", "/v1/models", None)))
        if path == "/props":
            return self._answer(200, self.translator.props(self._fetch("GET", "/props", None)))
        if path == "/slots" and self.translator.options.shows_slots:
            return self._answer(200, self.translator.slots(self._fetch("GET", "/metrics", None)))
        if path == "/apply-template":
            return self._answer(200, {"prompt": self._prompt(body)})
        if path == "/tokenize" and isinstance(body, dict):
            body = {name: body[name] for name in ("content", "add_special", "with_pieces") if name in body}
        if path in ("/health", "/tokenize", "/detokenize") or (path == "/" and self.translator.options.shows_page):
            status, answer, headers = self.backend.json(self.command, path, body, self._sent())
            return self._answer(
                status, self.translator.error(status, answer), {"Content-Type": headers["content-type"]}
            )
        status = 404 if path == "/" else 501
        return self._answer(status, self.translator.error(status, f"{path} has no meaning here"))

    def _fetch(self, method: str, path: str, body: Any) -> Any:
        status, answer, _ = self.backend.json(method, path, body, self._sent(), self.connection)
        if status != 200:
            raise Refusal(status, answer)
        return answer

    def _prompt(self, body: Any) -> str:
        return str(self._fetch("POST", "/apply-template", self.translator.conversation(body))["prompt"])

    def _tokens(self, text: str, special: bool = False) -> list[int]:
        body = {"content": text, "add_special": special}
        return list(self._fetch("POST", "/tokenize", body)["tokens"])

    def _as_openai(self, endpoint: str, body: Any) -> None:
        """Answer an OpenAI request: remove llama.cpp's extensions from it, and add them to the answer."""
        is_chat = endpoint == "/chat/completions"
        sent = self.translator.conversation(body) if is_chat else self.translator.plain(endpoint, body)
        verbose = is_chat and (body.get("verbose", self.translator.options.verbose))
        more = {"__verbose": {"prompt": self._prompt(body)}} if verbose else {}
        clock = self.translator.clock()
        response, line = self.backend.ask("POST", "/v1" + endpoint, sent, self._sent())
        if response.status == 200 and sent.get("stream"):
            self._stream(self.translator.changed_stream(events(response), clock), has_names=endpoint == "/responses")
        else:
            answer = json.loads(response.read())
            if response.status == 200:
                answer = self.translator.changed(answer, clock) | more
            self._answer(response.status, self.translator.error(response.status, answer))
        line.close()

    def _native(self, body: Any) -> None:
        """Answer a request in llama.cpp's own format."""
        prompts, several = self._prompts(body.get("prompt"))
        requests = [self.translator.native(body, prompt, self._tokens) for prompt in prompts]
        if requests[0].get("stream"):
            clock = self.translator.clock()
            response, line = self.backend.ask("POST", "/v1/completions", requests[0], self._sent())
            if response.status != 200:
                raise Refusal(response.status, json.loads(response.read()))
            self._stream(self.translator.native_stream(events(response), body, requests[0], clock, self._tokens))
            line.close()
            return
        answers = []
        for request in requests:
            clock = self.translator.clock()
            answer = self._fetch("POST", "/v1/completions", request)
            text = self._fetch("POST", "/detokenize", {"tokens": request["prompt"]})["content"]
            answers.append(self.translator.native_answer(answer, body, request, text, clock, self._tokens))
        self._answer(200, answers if several else answers[0])

    def _prompts(self, prompt: Any) -> tuple[list[list[int]], bool]:
        """Return the prompts as token ids, and whether the answer is a list.

        A list with at least one number is a single prompt, whose parts are token ids and texts.
        """
        several = isinstance(prompt, list) and not any(isinstance(part, int) for part in prompt)
        prompts = []
        for value in prompt if several else [prompt]:
            parts = value if isinstance(value, list) else [value]
            tokens: list[int] = []
            for part in parts:
                text = part.get("prompt_string") if isinstance(part, dict) else part
                if isinstance(part, dict) and set(part) != {"prompt_string"}:
                    raise Refusal(400, "only prompts of text are supported")
                tokens += [text] if isinstance(text, int) else self._tokens(str(text), special=not tokens)
            prompts.append(tokens)
        return prompts, several

    def _stream(self, events: Iterator[Any], has_names: bool = False) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for event in events:
            name = f"event: {event['type']}\n" if has_names else ""
            self.wfile.write(f"{name}data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = b"" if body is None else body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        all_headers = {"Content-Type": "application/json", **(headers or {}), "Content-Length": str(len(data))}
        for name, value in all_headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing, in place of the base class."""


def main() -> None:
    """Serve until SIGTERM, or until neuronpipe ends."""
    options = Options.read(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    backend = Neuronpipe(options)
    try:
        Handler.backend, Handler.translator = backend, Translator(options)
        server = ThreadingHTTPServer((options.host, options.port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.exit(backend.process.wait())
    finally:
        backend.process.send_signal(signal.SIGINT)
        backend.process.wait(30)


if __name__ == "__main__":
    main()
