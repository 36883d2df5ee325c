"""The helper process: runs requests one after the other, within limits that the kernel enforces.

It ends with the service, at the first request that exceeds its time limit, and when no request comes for IDLE_S (see
`Work`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from neuronpipe.native import lib
from neuronpipe.protocol.process_facts import private_writable_bytes
from neuronpipe.services.untrusted.frames import HEADER, Kind, frame

IDLE_S = 60
IDLE_EXIT = 75
GRACE_S = 0.25  # so that the service, if it is not busy, kills the process first
MAX_OUTPUT_BYTES = 64 << 10
MAX_STACK_BYTES = 8 << 20

Work = Callable[[bytes], bytes]
"""A function from request to answer. An exception fails the request with its text. An attribute `idle_s`, if any,
replaces IDLE_S; None means that the process waits without a limit."""

Prepare = Callable[[bytes], Work]
"""A function that prepares a new process. Its argument is the payload of the first frame, the setup."""


class Memory(NamedTuple):
    """The bytes by which a process's private writable memory may grow.

    jobs_bytes: after the preparation; during the preparation it may grow by the sum of both
    """

    setup_bytes: int
    jobs_bytes: int


def serve(link: socket.socket, prepare: Prepare, memory: Memory) -> None:
    """Prepare the work by the first request, then answer requests until the service closes the link."""
    lib.np_process_name(b"np-untrusted")
    _limit(memory.setup_bytes + memory.jobs_bytes)
    work: Work | None = None
    while (request := _receive(link, getattr(work, "idle_s", IDLE_S))) is not None:
        timeout_s, payload = request
        signal.setitimer(signal.ITIMER_REAL, timeout_s + GRACE_S)  # nothing handles SIGALRM: it ends the process
        if work is None:
            work, kind, answer = prepare(payload), Kind.ANSWER, b""
            _limit(memory.jobs_bytes)
        else:
            kind, answer = _attempt(work, payload)
        signal.setitimer(signal.ITIMER_REAL, 0)
        link.sendall(frame(kind, answer))


def become(link: socket.socket, errors: int, prepare: Prepare, memory: Memory, parent: int) -> NoReturn:
    """Serve in a forked child, and end it.

    errors: the descriptor for standard error
    parent: the process id of the service
    """
    code = 1
    try:
        gc.freeze()  # the collector would write to, and so copy, memory that is shared with the service
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        lib.np_process_die_with(parent)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor, target in ((null, 0), (null, 1), (errors, 2)):
            os.dup2(descriptor, target)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        os.closerange(3, link.fileno())
        os.closerange(link.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        serve(link, prepare, memory)
        code = 0
    except OSError:  # the service is gone
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


def _attempt(work: Work, payload: bytes) -> tuple[Kind, bytes]:
    try:
        return Kind.ANSWER, work(payload)
    except MemoryError:
        return Kind.OUT_OF_MEMORY, b""
    except BaseException as error:  # a panic of a Rust library is not an Exception
        return Kind.FAILED, f"{type(error).__name__}: {error}".encode(errors="replace")[:4096]


def _receive(link: socket.socket, idle_s: float | None) -> tuple[float, bytes] | None:
    """Return the time limit in seconds and the payload of the next request; None when the service has closed the link.

    It ends the process after idle_s seconds without a request; None: there is no limit.
    """
    if not select.select([link], [], [], idle_s)[0]:
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
    """Limit the growth of this process's private writable memory, its stack and the size of its files; no core dumps.

    RLIMIT_AS would not work, because threads and allocators reserve addresses that they never use. RLIMIT_DATA counts
    only private writable memory.
    """
    limits = {
        resource.RLIMIT_DATA: private_writable_bytes() + memory_bytes,
        resource.RLIMIT_STACK: MAX_STACK_BYTES,
        resource.RLIMIT_FSIZE: MAX_OUTPUT_BYTES,  # standard error is a file, which the service reads after a death
        resource.RLIMIT_CORE: 0,
    }
    for limit, soft in limits.items():
        _, hard = resource.getrlimit(limit)
        value = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (value, value))


def main(descriptor: int, parent: int, target: str, memory: Memory) -> None:
    """Serve as a program of its own.

    target: `module:function` of the `Prepare`
    """
    lib.np_process_die_with(parent)
    module, _, name = target.partition(":")
    prepare: Prepare = getattr(importlib.import_module(module), name)
    try:
        serve(socket.socket(fileno=descriptor), prepare, memory)
    except (BrokenPipeError, ConnectionResetError):  # the service is gone
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Memory(*map(int, sys.argv[4:6])))
