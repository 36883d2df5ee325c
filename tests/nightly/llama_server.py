"""Stands in for llama.cpp's `llama-server` where its tests start it: `neuronpipe serve` behind its options and paths.

What has a meaning here is translated (llama_words.py); other options are passed over, other paths answered with 501.
The model is a small random one with the chat template that the options ask for: what their tests say of their model's
text cannot hold.
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

from tests.nightly.llama_words import Options, Refusal, Words

MOST_CONTEXT_TOKENS = 8192
PACKAGES = Path(os.environ["NEURONPIPE_LLAMA_PACKAGES"])
NATIVE = ("/completion", "/completions")
COPIED_HEADERS = ("Authorization", "X-Api-Key", "Origin")
ASKED_OF_CORS = ("Access-Control-Request-Method", "Access-Control-Request-Headers")
CORS = ("access-control-allow-origin", "access-control-allow-headers", "access-control-allow-methods", "vary")


def package(template: str) -> Path:
    """A converted random model with this chat template and a context that is long enough; made once."""
    folder = PACKAGES / hashlib.sha256(template.encode()).hexdigest()[:16]
    if not folder.exists():
        from dataclasses import replace

        from neuronpipe.plans.convert import convert

        from tests.conformance.checkpoints import TINY, write_checkpoint

        source = PACKAGES / f"source-{os.getpid()}"
        write_checkpoint(source, replace(TINY, context_tokens=MOST_CONTEXT_TOKENS, vocabulary=1000))
        (source / "chat_template.jinja").write_text(template)
        made = PACKAGES / f"made-{os.getpid()}"
        convert(source, made, quantization="q8")
        made.rename(folder)
    return folder


class NeuronpipeServer:
    """A run of ours behind a port that nobody else knows."""

    def __init__(self, options: Options) -> None:
        context = min(options.context_tokens, MOST_CONTEXT_TOKENS)
        words = [sys.executable, "-m", "neuronpipe.launch", "serve", str(package(options.template)), "--port", "0"]
        words += ["--json", "--context", str(context), "--sequences", str(options.slots)]
        words += ["--key", options.key] if options.key else []
        words += [word for origin in options.origins for word in ("--cors", origin)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        self.port = int(said["address"].rpartition(":")[2])

    def ask(
        self, method: str, path: str, body: Any, headers: dict[str, str], client: socket.socket | None = None
    ) -> tuple[http.client.HTTPResponse, http.client.HTTPConnection]:
        """Send a request; the response is open. client: whose request it is; ours ends when it hangs up before."""
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
        """A whole answer: status, JSON or text, headers. Nobody waits for it when the client hangs up."""
        response, line = self.ask(method, path, body, headers, client)
        data = response.read()
        line.close()
        try:
            return response.status, json.loads(data), dict(response.getheaders())
        except ValueError:
            return response.status, data.decode(), dict(response.getheaders())


def events(response: http.client.HTTPResponse) -> Iterator[Any]:
    """The objects of a stream, as they come."""
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])


class Handler(BaseHTTPRequestHandler):
    """One request of a test."""

    protocol_version = "HTTP/1.1"
    ours: NeuronpipeServer
    words: Words

    def do_GET(self) -> None:
        self._serve(None)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length") or 0))
        self._serve(json.loads(data) if data else {})

    def do_OPTIONS(self) -> None:
        status, _, headers = self.ours.json("OPTIONS", "/v1/completions", None, self._sent())
        cors = {name.title(): value for name, value in headers.items() if name.lower() in CORS}
        self._answer(200 if status == 204 else status, None, cors)

    def _sent(self) -> dict[str, str]:
        return {name: self.headers[name] for name in (*COPIED_HEADERS, *ASKED_OF_CORS) if self.headers[name]}

    def _serve(self, body: Any) -> None:
        path = self.path.partition("?")[0]
        asked = path.removeprefix("/v1")
        try:
            if path in NATIVE:
                self._native(body)
            elif asked == "/chat/completions/input_tokens":
                self._answer(200, {"input_tokens": len(self._tokens(self._prompt(body)))})
            elif asked in ("/chat/completions", "/completions", "/responses"):
                self._as_openai(asked, body)
            else:
                self._small(path, asked, body)
        except Refusal as refusal:
            self._answer(refusal.status, self.words.error(refusal.status, refusal.body))

    def _small(self, path: str, asked: str, body: Any) -> None:
        if asked == "/models":
            return self._answer(200, self.words.models(self._asked_for("GET", "/v1/models", None)))
        if path == "/props":
            return self._answer(200, self.words.props(self._asked_for("GET", "/props", None)))
        if path == "/slots" and self.words.options.shows_slots:
            return self._answer(200, self.words.slots(self._asked_for("GET", "/metrics", None)))
        if path == "/apply-template":
            return self._answer(200, {"prompt": self._prompt(body)})
        if path == "/tokenize" and isinstance(body, dict):
            body = {name: body[name] for name in ("content", "add_special", "with_pieces") if name in body}
        if path in ("/health", "/tokenize", "/detokenize") or (path == "/" and self.words.options.shows_page):
            status, answer, headers = self.ours.json(self.command, path, body, self._sent())
            return self._answer(status, self.words.error(status, answer), {"Content-Type": headers["content-type"]})
        status = 404 if path == "/" else 501
        return self._answer(status, self.words.error(status, f"{path} has no meaning here"))

    def _asked_for(self, method: str, path: str, body: Any) -> Any:
        status, answer, _ = self.ours.json(method, path, body, self._sent(), self.connection)
        if status != 200:
            raise Refusal(status, answer)
        return answer

    def _prompt(self, body: Any) -> str:
        return str(self._asked_for("POST", "/apply-template", self.words.conversation(body))["prompt"])

    def _tokens(self, text: str, special: bool = False) -> list[int]:
        asked = {"content": text, "add_special": special}
        return list(self._asked_for("POST", "/tokenize", asked)["tokens"])

    def _as_openai(self, asked: str, body: Any) -> None:
        """OpenAI's own paths: their extensions taken out of the request, and put into the answer."""
        sent = self.words.conversation(body) if asked == "/chat/completions" else self.words.plain(asked, body)
        verbose = asked == "/chat/completions" and (body.get("verbose", self.words.options.verbose))
        more = {"__verbose": {"prompt": self._prompt(body)}} if verbose else {}
        clock = self.words.clock()
        response, line = self.ours.ask("POST", "/v1" + asked, sent, self._sent())
        if response.status == 200 and sent.get("stream"):
            self._stream(self.words.changed_stream(events(response), clock), named=asked == "/responses")
        else:
            answer = json.loads(response.read())
            if response.status == 200:
                answer = self.words.changed(answer, clock) | more
            self._answer(response.status, self.words.error(response.status, answer))
        line.close()

    def _native(self, body: Any) -> None:
        """llama.cpp's own completions."""
        prompts, several = self._prompts(body.get("prompt"))
        asks = [self.words.native(body, prompt, self._tokens) for prompt in prompts]
        if asks[0].get("stream"):
            clock = self.words.clock()
            response, line = self.ours.ask("POST", "/v1/completions", asks[0], self._sent())
            if response.status != 200:
                raise Refusal(response.status, json.loads(response.read()))
            self._stream(self.words.native_stream(events(response), body, asks[0], clock, self._tokens))
            line.close()
            return
        answers = []
        for ask in asks:
            clock = self.words.clock()
            found = self._asked_for("POST", "/v1/completions", ask)
            text = self._asked_for("POST", "/detokenize", {"tokens": ask["prompt"]})["content"]
            answers.append(self.words.native_answer(found, body, ask, text, clock, self._tokens))
        self._answer(200, answers if several else answers[0])

    def _prompts(self, prompt: Any) -> tuple[list[list[int]], bool]:
        """Prompts as token ids, and whether there were several: a list of numbers, and texts between them, is one."""
        several = isinstance(prompt, list) and not any(isinstance(part, int) for part in prompt)
        made = []
        for one in prompt if several else [prompt]:
            parts = one if isinstance(one, list) else [one]
            tokens: list[int] = []
            for part in parts:
                text = part.get("prompt_string") if isinstance(part, dict) else part
                if isinstance(part, dict) and set(part) != {"prompt_string"}:
                    raise Refusal(400, "prompts of other kinds than text are not understood")
                tokens += [text] if isinstance(text, int) else self._tokens(str(text), special=not tokens)
            made.append(tokens)
        return made, several

    def _stream(self, found: Iterator[Any], named: bool = False) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for one in found:
            name = f"event: {one['type']}\n" if named else ""
            self.wfile.write(f"{name}data: {json.dumps(one)}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = b"" if body is None else body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        said = {"Content-Type": "application/json", **(headers or {}), "Content-Length": str(len(data))}
        for name, value in said.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


def main() -> None:
    """Serve until SIGTERM."""
    options = Options.read(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ours = NeuronpipeServer(options)
    try:
        Handler.ours, Handler.words = ours, Words(options)
        server = ThreadingHTTPServer((options.host, options.port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.exit(ours.process.wait())
    finally:
        ours.process.send_signal(signal.SIGINT)
        ours.process.wait(30)


if __name__ == "__main__":
    main()
