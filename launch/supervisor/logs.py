"""What the processes of a run leave to be read: their logs, and why one could not go on."""

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
KEPT_LOG_BYTES = 1 << 16
SILENT = "it left no message; was it killed by the system for lack of memory?"


class ProcessLogs:
    """Files in the run directory: a log for each process of the plan, which goes on when it is started again, and
    `failure`, whose space is taken at the start: a full disk is a reason as well. Raises OSError when there is none."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        (directory / FAILURE).write_bytes(b" " * FAILURE_BYTES)
        self._starts: dict[ProcessSpec, int] = {}  # where the present process's part of its log begins

    def begin(self, spec: ProcessSpec) -> None:
        """A process is about to be started."""
        try:
            self._starts[spec] = self._log(spec).stat().st_size
        except OSError:
            self._starts[spec] = 0

    def take_streams(self, spec: ProcessSpec, kept: set[int]) -> None:
        """In the child: nothing to read, and a log to write, if there is room for one. Closes what came from the
        parent, but for memory and `kept`: the client's pipes and terminals stay with the client."""
        null = os.open(os.devnull, os.O_RDWR)
        try:
            descriptor = os.open(self._log(spec), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError:
            descriptor = null
        for target, source in ((0, null), (1, descriptor), (2, descriptor)):
            os.dup2(source, target)
        close_descriptors(lambda number, target: number not in {0, 1, 2, *kept} and not target.startswith("/memfd:"))
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO, force=True)

    def fail(self, why: str) -> None:
        """In the child: what the person who started the run is to read. It exits with status 2 then."""
        with (self._directory / FAILURE).open("r+b") as file:  # what is truncated could not be had again
            file.write(why.encode()[:FAILURE_BYTES].ljust(FAILURE_BYTES))

    def failure(self) -> str | None:
        """What a process that exited with status 2 left; taken away."""
        path = self._directory / FAILURE
        said = ""
        with contextlib.suppress(OSError):
            said = path.read_text(encoding="utf-8", errors="replace").strip()
            path.write_bytes(b" " * FAILURE_BYTES)
        return said or None

    def note(self, spec: ProcessSpec, line: str) -> None:
        """Add a line to a process's log, from outside."""
        with contextlib.suppress(OSError), self._log(spec).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def kept(self, spec: ProcessSpec) -> str:
        """Copy the end of a process's log to the user's cache folder, over the one of an earlier run: the run directory
        goes with the run. Returns where it is as the end of a line for a person; empty if it could not be written."""
        folder = cache_folder()
        if folder is None:
            return ""
        copy = folder / "logs" / self._log(spec).name
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(self._log(spec).read_bytes()[-KEPT_LOG_BYTES:])
        except OSError:
            return ""
        return f"; its log is {copy}"

    def last_words(self, spec: ProcessSpec) -> str:
        """The last line that the present process wrote."""
        return last_line(self._log(spec), self._starts[spec])

    def _log(self, spec: ProcessSpec) -> Path:
        return self._directory / f"{spec.role}.{spec.index}.log"


def close_descriptors(unwanted: Callable[[int, str], bool]) -> None:
    """Close the descriptors of this process that are unwanted. A forked child has those of its parent, also the ones
    that close on exec. unwanted: called with each number and what it refers to, as /proc says."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor that listed the directory
            if unwanted(int(name), os.readlink(f"/proc/self/fd/{name}")):
                os.close(int(name))


def last_line(log: Path, start: int = 0) -> str:
    """The last line of a log from this byte on."""
    try:
        with log.open("rb") as stream:
            stream.seek(start)
            lines = stream.read().decode(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else SILENT
