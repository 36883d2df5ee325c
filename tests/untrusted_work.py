"""Work for helper processes that tests let go wrong: `tests.untrusted_work:prepare`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from neuronpipe.services.untrusted import process


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """Answer with what the request says; setup comes first in each answer."""
    if setup == b"broken":
        raise RuntimeError("nothing to work with")
    kept: list[bytearray] = []
    if setup.startswith(b"grow "):
        kept.extend(bytearray(b"x" * (1 << 20)) for _ in range(int(setup[5:])))

    def work(request: bytes) -> bytes:
        what, _, rest = request.partition(b" ")
        match what:
            case b"echo":
                return setup + rest
            case b"pid":
                return str(os.getpid()).encode()
            case b"descriptors":
                return str(len(os.listdir("/proc/self/fd")) - 1).encode()
            case b"secret":
                return os.environ.get("NEURONPIPE_SECRET", "none").encode()
            case b"loop":
                while True:
                    pass
            case b"sleep":
                time.sleep(float(rest))
            case b"eat":
                while True:
                    kept.append(bytearray(1 << 20))
            case b"grow":  # in one piece: smaller ones may lie in what the parent of a fork has freed
                kept.append(bytearray(b"x") * (int(rest) << 20))
            case b"threads":
                threads = [threading.Thread(target=time.sleep, args=(0.05,)) for _ in range(2)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            case b"raise":
                raise ValueError(rest.decode())
            case b"exit":
                os._exit(int(rest))
            case b"abort":
                sys.stderr.write("something is very wrong\n")
                sys.stderr.flush()
                os.abort()
            case b"allocate":
                os.write(2, b"memory allocation of 11264 bytes failed\n")
                time.sleep(60)  # as a library in Rust that waits for a lock of its own
            case b"stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case b"recurse":
                sys.setrecursionlimit(10**9)
                return work(request)
            case b"idle":
                for module in (sys.modules["__main__"], process):  # of a program, and of a fork
                    module.IDLE_S = 0  # type: ignore[attr-defined]
            case b"long":
                return b"x" * int(rest)
        return b"done"

    return work
