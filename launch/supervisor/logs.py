"""The logs of a run's processes, and the message of a process that could not go on."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from neuronpipe.plans.measure.probe import cache_folder
from neuronpipe.plans.plan.document import ProcessSpec

FAILURE = "failure"
FAILURE_BYTES = 1 << 12
SAVED_LOG_BYTES = 1 << 16
SILENT = "it left no message; was it killed by the system for lack of memory?"


class ProcessLogs:
    """Files in the run directory: a log for each process of the plan, and the file `failure`.

    A restarted process appends to its log. The space of `failure` is allocated at the start, because a full disk may
    be the failure to report. Raises OSError if there is no space.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        (directory / FAILURE).write_bytes(b" " * FAILURE_BYTES)
        self._starts: dict[ProcessSpec, int] = {}  # where the log of the current incarnation begins

    def begin(self, spec: ProcessSpec) -> None:
        """Note where the log of an incarnation begins, just before the process is started."""
        try:
            self._starts[spec] = self._log(spec).stat().st_size
        except OSError:
            self._starts[spec] = 0

    def redirect_streams(self, spec: ProcessSpec, inherited: set[int]) -> None:
        """In the child: redirect stdin from /dev/null, and stdout and stderr to the log, or /dev/null without one.

        Closes the parent's other descriptors, except segments and `inherited`, so that pipes and terminals stay with
        the client.
        """
        null = os.open(os.devnull, os.O_RDWR)
        try:
            descriptor = os.open(self._log(spec), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError:
            descriptor = null
        for target, source in ((0, null), (1, descriptor), (2, descriptor)):
            os.dup2(source, target)
        close_descriptors(
            lambda number, target: number not in {0, 1, 2, *inherited} and not target.startswith("/memfd:")
        )
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO, force=True)

    def fail(self, message: str) -> None:
        """In the child, before it exits with status 2: write the message for the user who started the run."""
        with (self._directory / FAILURE).open("r+b") as file:  # not truncated, which would give the space back
            file.write(message.encode()[:FAILURE_BYTES].ljust(FAILURE_BYTES))

    def failure(self) -> str | None:
        """Return and clear the message of a process that exited with status 2."""
        path = self._directory / FAILURE
        message = ""
        with contextlib.suppress(OSError):
            message = path.read_text(encoding="utf-8", errors="replace").strip()
            path.write_bytes(b" " * FAILURE_BYTES)
        return message or None

    def note(self, spec: ProcessSpec, line: str) -> None:
        with contextlib.suppress(OSError), self._log(spec).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def save(self, spec: ProcessSpec) -> str:
        """Copy the end of a process's log to the user's cache folder, because the run directory is removed.

        Replaces the copy of an earlier run. Returns the path as the end of a message; empty if it cannot be written.
        """
        folder = cache_folder()
        if folder is None:
            return ""
        copy = folder / "logs" / self._log(spec).name
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(self._log(spec).read_bytes()[-SAVED_LOG_BYTES:])
        except OSError:
            return ""
        return f"; its log is {copy}"

    def last_words(self, spec: ProcessSpec) -> str:
        """Return the last line that the current incarnation wrote; SILENT if there is none."""
        return last_line(self._log(spec), self._starts[spec])

    def _log(self, spec: ProcessSpec) -> Path:
        return self._directory / f"{spec.role}.{spec.index}.log"


def close_descriptors(unwanted: Callable[[int, str], bool]) -> None:
    """Close descriptors of this process: a fork inherits all, also those that close on exec.

    unwanted: called with each number and its target as in /proc; returns True to close it
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor that listed the directory
            if unwanted(int(name), os.readlink(f"/proc/self/fd/{name}")):
                os.close(int(name))


def last_line(log: Path, start: int = 0) -> str:
    """Return the last line of a log, from the byte `start` on; SILENT if there is none."""
    try:
        with log.open("rb") as stream:
            stream.seek(start)
            lines = stream.read().decode(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else SILENT
