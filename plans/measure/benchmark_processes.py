"""Processes that measure together, each on its own core, as a run's workers compute together.

They are forked, so they see the memory that was mapped shared before; each does its work as a generator and yields
figures, one list for each measurement, all in the same order. They die with who asked.
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
SPIN_US = 50  # as workers of a run
PASSES_S = 1.0

Work = Callable[["BenchmarkProcess"], Iterator[Sequence[float]]]
"""What a member does; yields the figures of one measurement after the other."""
OnMeasured = Callable[[int], None]
"""Called with how many measurements are done now: 1 after each, and 0 every PASSES_S while one is waited for."""


class BenchmarkProcess:
    """One process of a crew. `index` of `count`; it runs on `core`, or anywhere (None)."""

    def __init__(self, index: int, count: int, core: int | None, page: Any) -> None:
        self.index, self.count, self.core = index, count, core
        self._barrier = ffi.cast("np_barrier *", page)
        self._epoch = ffi.cast("uint32_t *", page + 1024)

    def meet(self) -> None:
        """Go on when all members have come here."""
        done = lib.np_barrier_wait(self._barrier, self.count, self._epoch, 0, SPIN_US, MEETING_TIMEOUT_MS)
        if done < 0:
            raise RuntimeError(f"the others did not come within {MEETING_TIMEOUT_MS} ms")


def ignore_progress(count: int) -> None:
    """For who tells nobody."""


def measure_together(
    cores: Sequence[int | None], work: Work, progress: OnMeasured = ignore_progress
) -> Iterator[list[list[float]]]:
    """The figures of each measurement as soon as all members have theirs: those of member 0, of member 1, ...

    Raises UserError when a member ends before its work is done.
    """
    memory = mmap.mmap(-1, PAGE_BYTES)  # shared with the members
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
        for one in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.process, signal.SIGKILL)
            os.waitpid(one.process, 0)
            os.close(one.pipe)


@dataclass
class _Started:
    """A member's process, the pipe from it, and what came through that and is no whole line yet."""

    process: int
    pipe: int
    rest: bytes = b""

    def read(self) -> None:
        data = os.read(self.pipe, 1 << 16)
        self.rest += data or b"a measuring process was killed\n"

    def take(self) -> bytes | None:
        """The next line, if there is a whole one."""
        line, end, rest = self.rest.partition(b"\n")
        if not end:
            return None
        self.rest = rest
        if line != END and not line.startswith(b"["):
            raise UserError(f"{line.decode(errors='replace')}; close other programs and try again")
        return line


def _next_lines(started: Sequence[_Started], progress: OnMeasured) -> list[bytes]:
    """One line of each. Raises UserError as soon as one of them has failed: the others may wait for it."""
    lines: dict[int, bytes] = {}
    while True:
        for one in started:
            if one.pipe not in lines and (line := one.take()) is not None:
                lines[one.pipe] = line
        waiting = {one.pipe: one for one in started if one.pipe not in lines}
        if not waiting:
            return [lines[one.pipe] for one in started]
        if not (readable := select.select(list(waiting), [], [], PASSES_S)[0]):
            progress(0)
        for pipe in readable:
            waiting[pipe].read()


def _start(member: BenchmarkProcess, work: Work) -> _Started:
    reading, writing = os.pipe()
    parent = os.getpid()
    process = os.fork()
    if process:
        os.close(writing)
        return _Started(process, reading)
    try:
        os.close(reading)
        lib.np_process_die_with(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal interrupts all; the parent ends this one
        gc.disable()
        _serve(member, work, writing)
    finally:
        os._exit(0)


def _serve(member: BenchmarkProcess, work: Work, pipe: int) -> None:
    try:
        if member.core is not None:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, {member.core})
        for figures in work(member):
            os.write(pipe, json.dumps(list(figures)).encode() + b"\n")
        os.write(pipe, END + b"\n")
    except Exception as error:  # whatever it is, the parent says it
        said = str(error) if isinstance(error, UserError) else f"measuring failed: {type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            os.write(pipe, f"{' '.join(said.split())}\n".encode())
