"""A small hub on loopback, for tests of `pull`: repositories from folders, and everything a network does to them.

What it answers is what the real one does, as far as huggingface_hub looks: model info with sizes and checksums, resolve
addresses with ETag and length, redirects to where large files lie, ranges, error codes in headers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE_BYTES = 4096  # from here on a file is kept apart from git
INFO = ""  # the name of the answer about a repository, in `Mirror.hostile`
_INFO = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?")
_FILE = re.compile(r"/(large/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Mirror:
    """The hub and what is to go wrong with it. hostile: by the name of a file, or INFO, what answers in place of the
    hub; it gets what an honest one would send. sent: of every download, (the file, its first byte, how many bytes)."""

    address: str = ""
    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)  # name -> commit -> files
    break_off: dict[str, list[int]] = field(default_factory=dict)  # file -> after so many bytes, once each
    hold: dict[str, int] = field(default_factory=dict)  # file -> after so many bytes nothing comes until `let_go`
    refuse: dict[str, int] = field(default_factory=dict)  # file -> status of every answer but one with its header
    damage: set[str] = field(default_factory=set)  # files of which one bit is wrong
    knows_ranges: bool = True
    gives_checksums: bool = True
    git_hash: str = "sha1"
    gated: set[str] = field(default_factory=set)
    hostile: dict[str, Callable[[BaseHTTPRequestHandler, bytes], object]] = field(default_factory=dict)
    sent: list[tuple[str, int, int]] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)
    let_go: threading.Event = field(default_factory=threading.Event)

    def add(self, name: str, folder: Path) -> str:
        """Serve a folder's files as the newest commit of a repository; returns the commit."""
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.repositories.setdefault(name, {})[commit] = files
        return commit

    def commit(self, name: str, revision: str | None) -> str | None:
        """The commit that a revision means; None: no such one."""
        commits = self.repositories[name]
        return list(commits)[-1] if revision in (None, "main") else revision if revision in commits else None

    def sent_bytes(self, name: str) -> int:
        """How many bytes of a file were sent in downloads."""
        return sum(count for file, _, count in self.sent if file == name)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    mirror: Mirror

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := _INFO.fullmatch(path):
            self._info(match[1], match[2])
        elif match := _FILE.fullmatch(path):
            self._file(match[1] is not None, match[2], match[3], match[4])
        else:
            self._error(404)

    def _error(self, status: int, code: str = "") -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _info(self, name: str, revision: str | None) -> None:
        mirror = self.mirror
        if name in mirror.gated:
            return self._error(403, "GatedRepo")
        if name not in mirror.repositories:
            return self._error(401, "RepoNotFound")
        if (commit := mirror.commit(name, revision)) is None:
            return self._error(404, "RevisionNotFound")
        siblings = [self._sibling(file, data) for file, data in mirror.repositories[name][commit].items()]
        text = json.dumps({"id": name, "modelId": name, "sha": commit, "siblings": siblings}).encode()
        if INFO in mirror.hostile:
            return self._let(mirror.hostile[INFO], text)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
        return None

    def _let(self, hostile: Callable[[BaseHTTPRequestHandler, bytes], object], data: bytes) -> None:
        """Have something else answer, until it or the client ends the connection."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            hostile(self, data)

    def _sibling(self, file: str, data: bytes) -> dict[str, Any]:
        found: dict[str, Any] = {"rfilename": file, "size": len(data)}
        if self.mirror.gives_checksums:
            found["blobId"] = hashlib.new(self.mirror.git_hash, b"blob %d\0" % len(data) + data).hexdigest()
            if len(data) >= LARGE_BYTES:
                found["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return found

    def _file(self, where_it_lies: bool, name: str, revision: str, file: str) -> None:
        mirror = self.mirror
        commit = mirror.commit(name, revision)
        data = mirror.repositories[name].get(commit or "", {}).get(file)
        if data is None:
            return self._error(404, "EntryNotFound")
        if file in mirror.hostile:
            return self._let(mirror.hostile[file], data)
        if len(data) >= LARGE_BYTES and not where_it_lies:
            self.send_response(302)
            self.send_header("Location", f"{mirror.address}/large{self.path}")
            self.send_header("X-Repo-Commit", str(commit))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        if file in mirror.damage:
            data = data[:-1] + bytes([data[-1] ^ 1])
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if mirror.knows_ranges else None
        if file in mirror.refuse and not (asked and asked[2]):
            return self._error(mirror.refuse[file])
        start = int(asked[1]) if asked else 0
        stop = min(int(asked[2]) + 1, len(data)) if asked and asked[2] else len(data)
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if asked and asked[2]:
            self.wfile.write(data[start:stop])
        else:
            self._send(file, start, data[start:stop])
        return None

    def _send(self, file: str, start: int, data: bytes) -> None:
        """Send the rest of a file: what is to go wrong goes wrong here, not where a header is read."""
        mirror = self.mirror
        whole = len(data)
        first = data[: mirror.hold[file]] if file in mirror.hold else data
        if mirror.break_off.get(file):
            first = data[: mirror.break_off[file].pop(0)]
            data = first
        mirror.sent.append((file, start, len(data)))
        try:
            self.wfile.write(first)
            if len(first) < len(data):
                self.wfile.flush()
                mirror.held.set()
                mirror.let_go.wait(60)
                self.wfile.write(data[len(first) :])
        except OSError:
            pass  # who asked has gone
        self.close_connection = len(data) < whole


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Say nothing of clients that have gone: stderr is what tests look at."""


@contextmanager
def hub_mirror() -> Iterator[Mirror]:
    """A mirror that serves while the context lasts."""
    mirror = Mirror()
    handler = type("Handler", (_Handler,), {"mirror": mirror})
    server = _Server(("127.0.0.1", 0), handler)
    mirror.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield mirror
    finally:
        mirror.let_go.set()
        server.shutdown()
        server.server_close()
        thread.join()
