"""The helper process: runs requests one after the other, within limits that the kernel enforces.

Started as a program, not forked: it has none of the service's memory, descriptors, threads or secrets. It ends with the
service, at the first request that takes too long, and after IDLE_S without a request.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from neuronpipe.native import lib
from neuronpipe.services.untrusted.frames import HEADER, Kind, frame

IDLE_S = 60
IDLE_EXIT = 75
GRACE_S = 0.25  # the service kills first, where it can
MAX_OUTPUT_BYTES = 64 << 10
MAX_STACK_BYTES = 8 << 20

Work = Callable[[bytes], bytes]
"""What answers requests. Its errors become failures of the request, with their text."""


def main(descriptor: int, parent: int, target: str, memory_bytes: int) -> None:
    """Serve requests from this socket. target: `module:function`; the function is given the first frame's payload, and
    returns the `Work`. memory_bytes: by how much private memory may grow once the module is imported."""
    lib.np_process_die_with(parent)
    lib.np_process_name(b"np-untrusted")
    link = socket.socket(fileno=descriptor)
    module, _, name = target.partition(":")
    prepare: Callable[[bytes], Work] = getattr(importlib.import_module(module), name)
    _limit(memory_bytes)
    work: Work | None = None
    while (request := _receive(link)) is not None:
        timeout_s, payload = request
        signal.setitimer(signal.ITIMER_REAL, timeout_s + GRACE_S)  # nothing handles SIGALRM: it ends the process
        if work is None:
            work, kind, answer = prepare(payload), Kind.ANSWER, b""
        else:
            kind, answer = _attempt(work, payload)
        signal.setitimer(signal.ITIMER_REAL, 0)
        link.sendall(frame(kind, answer))


def _attempt(work: Work, payload: bytes) -> tuple[Kind, bytes]:
    try:
        return Kind.ANSWER, work(payload)
    except MemoryError:
        return Kind.OUT_OF_MEMORY, b""
    except BaseException as error:  # a panic of a library in Rust is no Exception
        return Kind.FAILED, f"{type(error).__name__}: {error}".encode(errors="replace")[:4096]


def _receive(link: socket.socket) -> tuple[float, bytes] | None:
    """The next request and its time limit in seconds; None when the service has closed the link."""
    if not select.select([link], [], [], IDLE_S)[0]:
        os._exit(IDLE_EXIT)
    head = _exactly(link, HEADER.size)
    if head is None:
        return None
    _, timeout_ms, length = HEADER.unpack(head)
    payload = _exactly(link, length)
    return None if payload is None else (timeout_ms / 1000, payload)


def _exactly(link: socket.socket, count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        data = link.recv(min(1 << 20, count - len(received)))
        if not data:
            return None
        received += data
    return bytes(received)


def _limit(memory_bytes: int) -> None:
    """From here on this process's private writable memory grows by so much at most, its stack excepted, which has a
    limit of its own. It writes no files, and leaves no core. RLIMIT_AS would not do: threads and allocators reserve
    addresses that they never use, and RLIMIT_DATA counts only what can be written to."""
    data_pages = int(Path("/proc/self/statm").read_text().split()[5])
    limits = {
        resource.RLIMIT_DATA: data_pages * resource.getpagesize() + memory_bytes,
        resource.RLIMIT_STACK: MAX_STACK_BYTES,
        resource.RLIMIT_FSIZE: MAX_OUTPUT_BYTES,  # of standard error, which the service reads when this has died
        resource.RLIMIT_CORE: 0,
    }
    for limit, wanted in limits.items():
        _, hard = resource.getrlimit(limit)
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (value, value))


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    except OSError:  # the service is gone
        os._exit(0)
