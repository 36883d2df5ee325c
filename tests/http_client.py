"""HTTP as rude as a test needs it: bytes into a socket and out of it, and a server to send them to."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.pipeline import PATIENCE_S, Run, Shell, beside_progress

NOTICE = "neuronpipe: "


class Reply(NamedTuple):
    """One response, whole."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body's JSON."""
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The objects of a stream of events, without comments; the last line must say that it is complete."""
        parts = self.body.decode().split("\n\n")
        lines = [part.removeprefix("data: ") for part in parts if part and not part.startswith(":")]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]


class Server(NamedTuple):
    """A `serve` command that is ready."""

    process: subprocess.Popen[str]
    port: int
    run: Run

    def connect(self) -> socket.socket:
        """A connection to it."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """One request on a connection of its own; the body is JSON unless it is bytes."""
        with self.connect() as line:
            line.sendall(request(method, path, body, **headers))
            return read_reply(line)

    def post(self, path: str, **body: Any) -> Reply:
        """POST a JSON object."""
        return self.call("POST", path, body)


@contextlib.contextmanager
def served(shell: Shell, *options: str | Path, notices: bool = False) -> Iterator[Server]:
    """A server while the context lasts, ended as a person ends it.

    notices: it may say something on the way, such as that flash was measured again, which is then shown; in tests, with
        their made-up device, it may not
    """
    process = shell.start("serve", "--port", "0", "--no-idle-profile", "--json", *options)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        said = json.loads(line)
        yield Server(process, int(said["address"].rpartition(":")[2]), Run(shell, Path(said["run"])))
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
    errors = beside_progress(errors)
    for line in errors.splitlines() if notices else ():
        print(line, file=sys.stderr)
    assert errors == "" or (notices and all(line.startswith(NOTICE) for line in errors.splitlines())), errors
    assert process.returncode == 0, process.returncode


def request(method: str, path: str, body: Any = None, **headers: str) -> bytes:
    """The bytes of a request; header names are written with underscores."""
    payload = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"Host": "localhost", "Connection": "close", "Content-Length": str(len(payload))}
    lines |= {"Content-Type": "application/json"} if payload else {}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + payload


def read_reply(line: socket.socket, data: bytes = b"") -> Reply:
    """Everything up to the connection's end, chunks joined. data: what was read of it before.

    Raises ConnectionResetError if nothing was sent.
    """
    while piece := line.recv(1 << 16):
        data += piece
    if not data:
        raise ConnectionResetError("the connection was closed without an answer")
    head, _, rest = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while (size := int(rest.partition(b"\r\n")[0] or b"0", 16)) > 0:
            rest = rest.partition(b"\r\n")[2]
            body, rest = body + rest[:size], rest[size + 2 :]
        rest = body
    return Reply(int(first.split()[1]), headers, rest)
