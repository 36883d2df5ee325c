"""A run started by this command: the forked supervisor, and how to stop it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from neuronpipe.launch.supervisor import STOPPING, preload, supervise
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.plan import Plan
from neuronpipe.protocol.run_directory import RunDirectory
from neuronpipe.protocol.segments import Segment
from neuronpipe.services.gateway.listener import Listener
from neuronpipe.services.implementations import Implementations


@dataclasses.dataclass
class LiveRun:
    """The supervisor's process and the pipe on which it reports."""

    directory: RunDirectory
    pid: int
    report: int

    def failed(self, timeout_s: float = 0.0) -> str | None:
        """The reason when the run is over; None while it lives."""
        if not select.select([self.report], [], [], timeout_s)[0]:
            return None
        return os.read(self.report, 1 << 16).decode(errors="replace").strip() or "the run has ended"

    def stop(self) -> None:
        """End the run and wait until nothing of it is left."""
        try:
            os.kill(self.pid, signal.SIGTERM)
        except ProcessLookupError:
            return
        os.waitpid(self.pid, 0)


@contextlib.contextmanager
def started_run(
    package: Package,
    plan: Plan,
    path: Path | None,
    *,
    stays: bool,
    uses: Implementations | None = None,
    listener: Listener | None = None,
    fixed: Segment | None = None,
) -> Iterator[LiveRun]:
    """A new run, by a forked supervisor; it ends with the context. stays: it outlives a context that was left without
    an error, and this command; otherwise this process's memory counts as the run's. uses: what does the roles' work,
    where it is not ours. fixed: the fixed tensors, where another run has loaded them. Raises UserError when the run
    directory cannot be made.

    Signals wait until there is something to stop: Ctrl-C must not fall between a run and who ends it.
    """
    preload()
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        live = _fork(package, plan, path, stays, uses or Implementations(), listener, fixed)
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)  # what waited is raised here
            yield live
        except BaseException:
            live.stop()
            raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if not stays:
        live.stop()


def _fork(
    package: Package,
    plan: Plan,
    path: Path | None,
    stays: bool,
    uses: Implementations,
    listener: Listener | None,
    fixed: Segment | None,
) -> LiveRun:
    directory = RunDirectory.create(path)
    client = os.getpid()
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        os.setsid()
        if stays:
            _detach()
        supervise(directory, package, plan, write_end, () if stays else (client,), uses, listener, fixed)
    os.close(write_end)
    return LiveRun(directory, pid, read_end)


def _detach() -> None:
    """Let go of the terminal: a run that stays must not keep the shell's pipes open."""
    null = os.open(os.devnull, os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(null, target)
