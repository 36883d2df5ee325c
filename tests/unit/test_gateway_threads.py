"""What the gateway's threads may cost: a browser asked for all files of the page at once, each file took a thread, each
thread reserved address space, that was limited, and ZeroMQ ended the process, with all texts that were under way."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any

from neuronpipe.services.gateway.application import PAGE_FOLDER, _page_routes
from starlette.applications import Starlette

MANY_THREADS = """
import threading
from neuronpipe.protocol.channel import open_context
from neuronpipe.services.gateway.gateway_service import bounded_growth
import zmq

with bounded_growth():
    over = threading.Event()
    threads = [threading.Thread(target=lambda: (bytearray(100_000), over.wait()), daemon=True) for _ in range(24)]
    for thread in threads:
        thread.start()
    contexts = [open_context() for _ in range(12)]
    for context in contexts:
        context.socket(zmq.DEALER)
    print("threads and contexts", flush=True)
    over.set()
    try:
        bytearray(600 << 20)
    except MemoryError:
        print("too much")
"""


KINDS = {
    ".html": b"text/html",
    ".css": b"text/css",
    ".js": b"text/javascript",
    ".svg": b"image/svg+xml",
    ".webmanifest": b"application/manifest+json",
}


async def served(path: str, threads: set[threading.Thread]) -> tuple[dict[bytes, bytes], bytes]:
    """Headers and content of a file of the page. threads: those that there are meanwhile are added."""
    sent: list[Any] = []

    async def receive() -> Any:
        return await asyncio.Event().wait()  # the browser stays

    async def send(message: Any) -> None:
        sent.append(message)
        threads.update(threading.enumerate())

    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b"", "http_version": "1.1"}
    await Starlette(routes=_page_routes())(scope, receive, send)
    assert sent[0]["status"] == 200
    return dict(sent[0]["headers"]), b"".join(message.get("body", b"") for message in sent[1:])


def test_the_files_of_the_page_are_served_at_once_without_a_thread() -> None:
    files = sorted(PAGE_FOLDER.iterdir())
    paths = ["/" if file.name == "index.html" else f"/page/{file.name}" for file in files]

    async def all_at_once() -> list[tuple[dict[bytes, bytes], bytes]]:
        return await asyncio.gather(*(served(path, threads) for path in paths))

    before, threads = set(threading.enumerate()), set[threading.Thread]()
    for file, (headers, content) in zip(files, asyncio.run(all_at_once()), strict=True):
        assert content == file.read_bytes()
        kind = KINDS[file.suffix]
        assert headers[b"content-type"] == kind + (b"; charset=utf-8" if kind.startswith(b"text/") else b"")
    assert threads == before


def test_the_limit_of_memory_leaves_room_for_threads_and_not_for_a_large_request() -> None:
    made = subprocess.run([sys.executable, "-c", MANY_THREADS], capture_output=True, text=True, timeout=60, check=False)
    assert (made.stdout, made.returncode) == ("threads and contexts\ntoo much\n", 0), made.stderr
