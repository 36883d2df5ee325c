"""Starting a helper process, as a program or as a fork, and waiting for its end."""

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
    """A child process, until `wait` has returned its exit code."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def kill(self) -> None:
        """Kill the process, unless `wait` has returned its exit code."""
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit code, or the negative number of the signal that ended it; None if it still runs after
        timeout_s."""
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
    """Start a program that inherits the link, the errors and PASSED_VARIABLES. Raises OSError if it cannot be started.

    errors: the descriptor for standard error
    """
    command = [sys.executable, "-P", "-m", "neuronpipe.services.untrusted.process"]
    program = subprocess.Popen(
        [*command, str(link.fileno()), str(os.getpid()), target, *map(str, memory)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=[link.fileno()],
        env={name: value for name, value in os.environ.items() if name in PASSED_VARIABLES},
    )
    program.returncode = 0  # `HelperProcess` waits for it; without a code, Popen warns when it is deleted
    return HelperProcess(program.pid)


def fork_process(prepare: Prepare, link: socket.socket, errors: int, memory: Memory) -> HelperProcess:
    """Fork this process. Memory is shared until either side writes. Raises OSError if the kernel refuses.

    Only the calling thread continues in the child, so the child must not need a lock that another thread may hold.
    """
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of the service's native threads
        pid = os.fork()
    if pid == 0:
        become(link, errors, prepare, memory, parent)
    return HelperProcess(pid)
