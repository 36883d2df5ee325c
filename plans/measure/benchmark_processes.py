"""Processes that measure together, each on its own core, as a run's workers compute together.

They are forked, so they share memory that was mapped as shared before. Each runs a generator that yields the figures of
one measurement after the other; all processes measure the same in the same order. They die with the parent process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import select
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.protocol.errors import UserError

PAGE_BYTES = 4096
MEETING_TIMEOUT_MS = 60_000
END = b"end"
SPIN_US = 50  # as workers of a run spin at a barrier
HEARTBEAT_S = 1.0

Work = Callable[["BenchmarkProcess"], Iterator[Sequence[float]]]
"""The work of a benchmark process: it yields the figures of one measurement after the other."""
OnMeasured = Callable[[int], None]
"""Receives the number of new measurements: 1 after each, and 0 every HEARTBEAT_S while none ends."""


class BenchmarkProcess:
    """Process number `index` of `count` that measure together, pinned to `core` (None: not pinned).

    page: shared memory with the barrier of all processes
    """

    def __init__(self, index: int, count: int, core: int | None, page: Any) -> None:
        self.index, self.count, self.core = index, count, core
        self._barrier = ffi.cast("np_barrier *", page)
        self._epoch = ffi.cast("uint32_t *", page + 1024)

    def meet(self) -> None:
        """Wait until all processes have called this. Raises RuntimeError after MEETING_TIMEOUT_MS."""
        done = lib.np_barrier_wait(self._barrier, self.count, self._epoch, 0, SPIN_US, MEETING_TIMEOUT_MS)
        if done < 0:
            raise RuntimeError(f"the other processes did not arrive within {MEETING_TIMEOUT_MS} ms")


def ignore_progress(count: int) -> None:
    """Do nothing: the default of `progress` parameters."""


def measure_together(
    cores: Sequence[int | None], work: Work, progress: OnMeasured = ignore_progress
) -> Iterator[list[list[float]]]:
    """Start a process on each of `cores`, and yield the figures of each measurement when all processes have theirs.

    These are a list of figures for each process, in the order of `cores`. Raises UserError if a process fails or is
    killed.
    """
    memory = mmap.mmap(-1, PAGE_BYTES)  # shared with the processes
    page = ffi.from_buffer("uint8_t[]", memory)
    lib.np_barrier_reset(ffi.cast("np_barrier *", page))
    started: list[_Started] = []
    try:
        for index, core in enumerate(cores):
            started.append(_start(BenchmarkProcess(index, len(cores), core, page), work))
        while (lines := _next_lines(started, progress)) != [END] * len(lines):
            yield [json.loads(line) for line in lines]
            progress(1)
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)
            os.close(process.pipe)


@dataclass
class _Started:
    """A started process, the pipe from it, and received bytes that `take` has not returned yet."""

    pid: int
    pipe: int
    received: bytes = b""

    def read(self) -> None:
        data = os.read(self.pipe, 1 << 16)
        self.received += data or b"a benchmark process was killed\n"

    def take(self) -> bytes | None:
        """Remove and return the next complete line; None if there is none. Raises UserError for an error line."""
        line, newline, remainder = self.received.partition(b"\n")
        if not newline:
            return None
        self.received = remainder
        if line != END and not line.startswith(b"["):
            raise UserError(f"{line.decode(errors='replace')}; close other programs and try again")
        return line


def _next_lines(started: Sequence[_Started], progress: OnMeasured) -> list[bytes]:
    """Return the next line of each process. Raises UserError as soon as one fails, as the others may wait for it."""
    lines: dict[int, bytes] = {}
    while True:
        for process in started:
            if process.pipe not in lines and (line := process.take()) is not None:
                lines[process.pipe] = line
        waiting = {process.pipe: process for process in started if process.pipe not in lines}
        if not waiting:
            return [lines[process.pipe] for process in started]
        if not (readable := select.select(list(waiting), [], [], HEARTBEAT_S)[0]):
            progress(0)
        for pipe in readable:
            waiting[pipe].read()


def _start(process: BenchmarkProcess, work: Work) -> _Started:
    reading, writing = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(writing)
        return _Started(pid, reading)
    try:
        os.close(reading)
        lib.np_process_die_with(parent)
        # A terminal interrupts the whole process group, but only the parent may end this process.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.disable()
        _serve(process, work, writing)
    finally:
        os._exit(0)


def _serve(process: BenchmarkProcess, work: Work, pipe: int) -> None:
    try:
        if process.core is not None:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, {process.core})
        for figures in work(process):
            os.write(pipe, json.dumps(list(figures)).encode() + b"\n")
        os.write(pipe, END + b"\n")
    except Exception as error:  # the parent raises it as UserError
        message = str(error) if isinstance(error, UserError) else f"measuring failed: {type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            os.write(pipe, f"{' '.join(message.split())}\n".encode())
