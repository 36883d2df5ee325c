"""Measures the device profile by itself in the idle minutes of a run that stays.

    state      event                                                              next state
    waiting    no request came for `wait_s`, and memory is warm: a process starts measuring
    measuring  a request comes: the process is killed, and `wait_s` doubles       waiting
               the process ends with LATER, as the machine was busy: the same     waiting
               the process ends with DONE                                         measured
               it fails, or MAX_TRIES processes have been started                 failed

A run whose user opted out, or whose device has a valid profile, is in state "" for good. There is no timer besides the
next start: the supervisor looks when it is woken.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol

from neuronpipe.protocol.layouts.run import PROFILE_STATES
from neuronpipe.protocol.messages.client import ProfileState
from neuronpipe.services.monitor.process_usage import helpers_of

MODULE = "neuronpipe.launch.profile.idle_measurement"
LATER = 75  # exit status of that module
IDLE_S = 60.0
MAX_IDLE_S = 3600.0
MAX_TRIES = 8
LOG = "device-profile.log"


class Measuring(Protocol):
    """A process that measures, as `MeasuringProcess` starts it."""

    def start(self) -> int: ...

    def stop(self, pid: int) -> None: ...

    def clear(self) -> None: ...


class IdleProfile:
    """The schedule of measurements. It has no clock: all times are in seconds of one clock.

    requests: word of the board that counts requests
    state: word of the board with the index of the state in PROFILE_STATES
    is_warm: returns True if all weights are loaded that the cache wants
    measuring: starts and ends processes that measure; None: nothing is to be measured
    due_at: when to call `look` again; infinity if only a request matters
    """

    def __init__(
        self,
        requests: memoryview,
        state: memoryview,
        is_warm: Callable[[], bool],
        measuring: Measuring | None,
        now: float,
    ) -> None:
        self._requests, self._state, self._is_warm = requests, state, is_warm
        self._measuring = measuring
        self._wait_s, self._tries, self._pid = IDLE_S, 0, 0
        self._counted = requests[0]
        self.due_at = math.inf
        if measuring is not None:
            self._wait(now)

    @property
    def is_measuring(self) -> bool:
        return self._pid > 0

    def look(self, now: float) -> None:
        """Stop a measurement if a request has come, and start one if the run was idle for long enough."""
        if self._requests[0] != self._counted:
            self._counted = self._requests[0]
            if self.is_measuring:
                self.end()
                self._try_later(now)
            elif self.due_at < math.inf:
                self._wait(now)
        elif now >= self.due_at and self._measuring is not None:
            if not self._is_warm():
                self._wait(now)
                return
            self._tries += 1
            self.due_at = math.inf
            self._show("measuring")  # before the start: from now on the coordinator reports requests at once
            try:
                self._pid = self._measuring.start()
            except OSError:
                self._show("failed")

    def process_ended(self, pid: int, status: int, now: float) -> bool:
        """Note that a process has ended, with this exit status. Return False if it is not the one that measures."""
        if pid != self._pid or not self.is_measuring:
            return False
        self._pid = 0
        if self._measuring is not None:
            self._measuring.clear()
        if status == LATER:
            self._try_later(now)
        else:
            self._show("failed" if status else "measured")
        return True

    def end(self) -> None:
        """Kill the process that measures, if there is one."""
        if self.is_measuring and self._measuring is not None:
            pid, self._pid = self._pid, 0
            self._measuring.stop(pid)

    def _try_later(self, now: float) -> None:
        self._wait_s = min(2 * self._wait_s, MAX_IDLE_S)
        if self._tries >= MAX_TRIES:
            self._show("failed")
        else:
            self._wait(now)

    def _wait(self, now: float) -> None:
        self.due_at = now + self._wait_s
        self._show("waiting")

    def _show(self, state: ProfileState) -> None:
        self._state[0] = PROFILE_STATES.index(state)


class MeasuringProcess:
    """The process that measures for one package, with a folder of its own for temporary files.

    folder: the run directory, in which the log is written
    """

    def __init__(self, package: Path, folder: Path) -> None:
        self._package, self._folder = package, folder
        self._temporary: str | None = None

    def start(self) -> int:
        """Start the process and return its id. Raises OSError."""
        self.clear()
        self._temporary = tempfile.mkdtemp(prefix="np-")
        with (self._folder / LOG).open("ab") as log:
            return self._spawn(log, {**os.environ, "TMPDIR": self._temporary, "XDG_RUNTIME_DIR": self._temporary})

    def _spawn(self, log: IO[bytes], environment: dict[str, str]) -> int:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(self._package)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
        process.returncode = 0  # the supervisor reaps all of its children itself
        return process.pid

    def stop(self, pid: int) -> None:
        """Kill the process and all that it has started, and remove its files.

        It is stopped first, so that it starts nothing meanwhile. The run that it may have started is no child that
        ends with it, so each descendant is killed.
        """
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for descendant in (*_descendants(pid), pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(descendant, number)
        self.clear()

    def clear(self) -> None:
        """Remove the temporary files of the last process."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None


def _descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process, parents before their children."""
    descendants, generation = list[int](), [pid]
    while generation := helpers_of(generation):
        descendants += generation
    return descendants
