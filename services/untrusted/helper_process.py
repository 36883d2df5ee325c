"""Starting a helper process, as a program of its own or as a fork, and waiting for its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import warnings

from neuronpipe.services.untrusted.process import Memory, Prepare, become

PASSED_VARIABLES = frozenset(
    {"PATH", "HOME", "LANG", "LC_ALL", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "TMPDIR"}
    | {"PREFIX", "ANDROID_ROOT", "ANDROID_DATA", "ANDROID_ART_ROOT", "ANDROID_I18N_ROOT", "ANDROID_TZDATA_ROOT"}
)
LOOK_AGAIN_S = 0.002


class HelperProcess:
    """A child that runs, until it was waited for."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def kill(self) -> None:
        """Kill it, if it was not waited for."""
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit code, or minus the number of the signal that ended it; None when it still runs after so long."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while self._code is None:
            pid, status = os.waitpid(self.pid, 0 if until is None else os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif until is not None and time.monotonic() >= until:
                return None
            else:
                time.sleep(LOOK_AGAIN_S)
        return self._code


def start_program(target: str, link: socket.socket, errors: int, memory: Memory) -> HelperProcess:
    """A program of its own: it inherits no descriptor but its link, no memory, and no variable but those in the list.
    Raises OSError."""
    command = [sys.executable, "-P", "-m", "neuronpipe.services.untrusted.process"]
    program = subprocess.Popen(
        [*command, str(link.fileno()), str(os.getpid()), target, *map(str, memory)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=[link.fileno()],
        env={name: value for name, value in os.environ.items() if name in PASSED_VARIABLES},
    )
    program.returncode = 0  # it is not this object that waits
    return HelperProcess(program.pid)


def fork_process(prepare: Prepare, link: socket.socket, errors: int, memory: Memory) -> HelperProcess:
    """A fork of this process, whose memory it shares until either writes. Of its threads only this one goes on in the
    child, so that no lock of another may be needed there. Raises OSError."""
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the threads, which are C's
        pid = os.fork()
    if pid == 0:
        become(link, errors, prepare, memory, parent)
    return HelperProcess(pid)
