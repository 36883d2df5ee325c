"""The service's end of a helper process: jobs are submitted, and their outcomes collected.

    event                            result
    a job is submitted               the process is started if none runs; jobs run in the order of submission
    a job exceeds its time limit     the process is killed: that job fails, later jobs run in the next process
    the process dies                 that job fails, later jobs run in the next process
    no job for 60 s (see README.md)  the process ends; the next job starts another

A helper belongs to the thread that created it, which must live as long as the process: the kernel kills the process
when its parent thread ends. Only `wait` and `call` block for a job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import socket
import time
from collections import deque
from typing import Literal

from neuronpipe.protocol.frozen import frozen
from neuronpipe.services.untrusted.frames import FrameReader, Kind, frame
from neuronpipe.services.untrusted.helper_process import HelperProcess, fork_process, start_program
from neuronpipe.services.untrusted.process import IDLE_EXIT, Memory, Prepare

START_S = 60.0
MAX_PAYLOAD_BYTES = 16 << 20
CHUNK_BYTES = 256 << 10
RUST_OUT_OF_MEMORY = b"memory allocation of"  # Rust writes this before it ends the process
Reason = Literal["failed", "time", "memory", "died", "unavailable"]


class UntrustedError(Exception):
    """The failure of a job.

    reason: `failed`: the work raised an error; `time` or `memory`: the job exceeded that limit; `died`: the process
        ended; `unavailable`: no process can be started, which is not the job's fault
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


@frozen
class Outcome:
    """The outcome of the job whose number `submit` returned. The answer is empty if there is an error."""

    job: int
    answer: bytes
    error: UntrustedError | None = None

    def result(self) -> bytes:
        if self.error is not None:
            raise self.error
        return self.answer


@dataclasses.dataclass
class _Job:
    number: int  # 0: the preparation of a process
    payload: bytes
    timeout_s: float
    attempts: int = 0


class Helper:
    """Jobs of one kind of untrusted work, and the process that runs them.

    work: the function that prepares the work in a new process: as `module:function`, which starts a program; or as an
        object, which forks the service. See README.md
    setup: passed to that function in each new process
    memory_bytes: the bytes by which jobs may make a prepared process grow
    setup_bytes: the bytes by which a process may grow in addition while it is prepared
    starts: number of processes started so far
    """

    def __init__(self, work: str | Prepare, *, memory_bytes: int, setup: bytes = b"", setup_bytes: int = 0) -> None:
        self._work, self._memory, self._setup = work, Memory(setup_bytes, memory_bytes), setup
        self._epoll = select.epoll()
        self._jobs: deque[_Job] = deque()  # queued for the process; the first one is under way
        self._numbers = 0
        self._process: HelperProcess | None = None
        self._link: socket.socket | None = None
        self._errors = -1
        self._reader = FrameReader(MAX_PAYLOAD_BYTES)
        self._unsent = bytearray()
        self._waits_to_send = False
        self._deadline = 0.0
        self._failed_starts = 0  # in a row
        self.starts = 0

    @property
    def descriptor(self) -> int:
        """Return the descriptor to poll, which never changes. It is readable when `receive` has something to do, unless
        that is only a deadline: see `due_s`."""
        return self._epoll.fileno()

    @property
    def pid(self) -> int | None:
        """Return the id of the helper process; None if none runs."""
        return None if self._process is None else self._process.pid

    @property
    def due_s(self) -> float | None:
        """Return in how many seconds `receive` must be called even if the descriptor is not readable; None without a
        job."""
        return max(0.0, self._deadline - time.monotonic()) if self._jobs else None

    def submit(self, payload: bytes, timeout_s: float) -> int:
        """Submit a job and return its number.

        Raises ValueError if the payload is too long, UntrustedError if no process can be started.

        timeout_s: its time limit, counted from the end of the job before it; of the first job from now
        """
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"a job of {len(payload)} bytes, more than {MAX_PAYLOAD_BYTES}")
        self._numbers += 1
        job = _Job(self._numbers, payload, timeout_s)
        if self._process is None:
            try:
                self._start([])
            except OSError as error:
                raise _not_started(str(error.strerror)) from None
        self._append(job)
        self._send()
        return job.number

    def receive(self) -> list[Outcome]:
        """Return the outcomes since the last call; end a job whose deadline has passed."""
        outcomes: list[Outcome] = []
        if self._process is None:
            return outcomes
        if self._unsent:
            self._send()
        if self._read(outcomes):
            self._lost(outcomes)
        elif self._jobs and time.monotonic() >= self._deadline:
            self._end(outcomes, "time")
        return outcomes

    def wait(self, timeout_s: float | None = None) -> list[Outcome]:
        """Wait for the first outcome and return the outcomes; none after timeout_s, or if no job is left.

        timeout_s: None: no limit
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            outcomes = self.receive()
            left_s = None if until is None else until - time.monotonic()
            if outcomes or not self._jobs or (left_s is not None and left_s <= 0):
                return outcomes
            waits_s = [seconds for seconds in (left_s, self.due_s) if seconds is not None]
            self._epoll.poll(min(waits_s) + 0.001 if waits_s else None)

    def call(self, payload: bytes, timeout_s: float) -> bytes:
        """Run one job and return its answer; no other job may be under way.

        Raises UntrustedError if the job fails, ValueError if the payload is too long.
        """
        assert not self._jobs
        job = self.submit(payload, timeout_s)
        while True:
            for outcome in self.wait():
                if outcome.job == job:
                    return outcome.result()

    def close(self) -> None:
        """End the process. Its jobs get no outcome; a later job starts another process."""
        self._jobs.clear()
        self._reap()

    def dispose(self) -> None:
        """End the process and close the descriptor, for good."""
        self.close()
        self._epoll.close()

    # ---- the process -----------------------------------------------------------------------------------------
    def _start(self, jobs: list[_Job]) -> None:
        service_end, helper_end = socket.socketpair()
        service_end.setblocking(False)
        self._errors = os.memfd_create("untrusted-stderr", os.MFD_CLOEXEC)
        try:
            if isinstance(self._work, str):
                self._process = start_program(self._work, helper_end, self._errors, self._memory)
            else:
                self._process = fork_process(self._work, helper_end, self._errors, self._memory)
        except OSError:
            service_end.close()
            os.close(self._errors)
            raise
        finally:
            helper_end.close()
        self._link, self._reader, self._unsent = service_end, FrameReader(MAX_PAYLOAD_BYTES), bytearray()
        self._epoll.register(service_end, select.EPOLLIN)
        self._waits_to_send = False
        self.starts += 1
        self._jobs.clear()
        for job in (_Job(0, self._setup, START_S), *jobs):
            self._append(job)

    def _append(self, job: _Job) -> None:
        if not self._jobs:
            self._deadline = time.monotonic() + job.timeout_s
        self._jobs.append(job)
        self._unsent += frame(Kind.REQUEST, job.payload, job.timeout_s)

    def _send(self) -> None:
        assert self._link is not None
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:
                del self._unsent[: self._link.send(self._unsent[:CHUNK_BYTES])]
        if bool(self._unsent) != self._waits_to_send:
            self._waits_to_send = bool(self._unsent)
            self._epoll.modify(self._link, select.EPOLLIN | (select.EPOLLOUT if self._unsent else 0))

    def _read(self, outcomes: list[Outcome]) -> bool:
        """Read the answers that have arrived; return True if the process has ended or has broken the protocol."""
        assert self._link is not None
        try:
            while data := self._link.recv(CHUNK_BYTES):
                for kind, payload in self._reader.push(data):
                    self._answered(kind, payload, outcomes)
                if len(data) < CHUNK_BYTES:  # nothing more has come yet
                    return False
        except BlockingIOError:
            return False
        except (ConnectionResetError, ValueError, IndexError):
            pass
        return True

    def _answered(self, kind: Kind, payload: bytes, outcomes: list[Outcome]) -> None:
        job = self._jobs.popleft()
        if self._jobs:
            self._deadline = time.monotonic() + self._jobs[0].timeout_s
        if job.number == 0:
            self._failed_starts = 0
            return
        error = None
        if kind is Kind.OUT_OF_MEMORY:
            error = self._error("memory", job)
        elif kind is Kind.FAILED:
            error = UntrustedError("failed", payload.decode(errors="replace"))
        outcomes.append(Outcome(job.number, b"" if error else payload, error))

    def _lost(self, outcomes: list[Outcome]) -> None:
        """Handle a process that has closed its end of the link or has sent what is no answer."""
        assert self._process is not None
        code = self._process.wait(1.0)  # a kill at once would hide the process's own exit status
        last_words = self._last_words()
        if code == IDLE_EXIT and self._jobs and not self._jobs[0].attempts:
            self._jobs[0].attempts += 1  # the process was idle and ended before the job arrived
            self._restart(list(self._jobs), outcomes)
        elif code == -signal.SIGALRM:
            self._end(outcomes, "time")
        elif code == -signal.SIGABRT and RUST_OUT_OF_MEMORY in last_words:
            self._end(outcomes, "memory")
        else:
            self._end(outcomes, "died", last_words)

    def _end(self, outcomes: list[Outcome], reason: Reason, last_words: bytes = b"") -> None:
        """End the process and fail the job under way; the other jobs run in another process.

        A preparation is repeated once; if it fails again, all jobs fail.
        """
        if reason == "time" and RUST_OUT_OF_MEMORY in self._last_words():
            reason = "memory"  # a Rust library that is out of memory while it reports an error deadlocks
        jobs = list(self._jobs)
        if jobs and jobs[0].number == 0 and not self._failed_starts:
            self._failed_starts = 1  # another program may have killed it
        elif jobs and jobs[0].number == 0:  # the second failed start in a row
            self._failed_starts = 0
            words = " ".join(last_words.decode(errors="replace").split())[-300:]
            outcomes += [Outcome(job.number, b"", _not_started(words or reason)) for job in jobs[1:]]
            jobs = []
        elif jobs:
            outcomes.append(Outcome(jobs[0].number, b"", self._error(reason, jobs[0])))
        self._restart(jobs[1:], outcomes)

    def _restart(self, jobs: list[_Job], outcomes: list[Outcome]) -> None:
        self._reap()
        jobs = [job for job in jobs if job.number]
        self._jobs.clear()
        if not jobs:
            return
        try:
            self._start(jobs)
        except OSError as error:
            outcomes += [Outcome(job.number, b"", _not_started(str(error.strerror))) for job in jobs]
            return
        self._send()

    def _error(self, reason: Reason, job: _Job) -> UntrustedError:
        limits = {"time": f"it takes longer than {job.timeout_s:g} s", "memory": self._memory_text()}
        return UntrustedError(reason, limits.get(reason, "the process that did the work died"))

    def _memory_text(self) -> str:
        return f"it takes more than {self._memory.jobs_bytes >> 20} MiB of memory"

    def _last_words(self) -> bytes:
        """Return the last 4096 bytes that the process wrote to standard error."""
        size = os.fstat(self._errors).st_size
        return os.pread(self._errors, 4096, max(0, size - 4096))

    def _reap(self) -> None:
        if self._process is None or self._link is None:
            return
        self._process.kill()
        self._process.wait()
        self._epoll.unregister(self._link)
        self._link.close()
        os.close(self._errors)
        self._process = self._link = None


def _not_started(why: str) -> UntrustedError:
    return UntrustedError("unavailable", f"the helper process does not start: {why}")
