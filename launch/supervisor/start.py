"""Start a run from this command by forking its supervisor, and stop it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import importlib
import os
import resource
import select
import signal
import sys
import traceback
from collections.abc import Callable, Container, Iterator
from pathlib import Path

from neuronpipe.launch.supervisor.logs import close_descriptors
from neuronpipe.launch.supervisor.supervisor import EXHAUSTED, HASTEN, STOPPING, Supervisor
from neuronpipe.native import lib
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import DEFAULT_BACKEND, Plan
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.memory.segments import Segment
from neuronpipe.protocol.run_directory import RunDirectory
from neuronpipe.services.runtime.implementations import OURS, Implementations
from neuronpipe.services.runtime.listener import Listener
from neuronpipe.services.steps.backend import BACKENDS

MIN_OPEN_FILES, OPEN_FILES_PER_PROCESS = 64, 4


@dataclasses.dataclass
class LiveRun:
    """A run that this command has started.

    pid: process id of the supervisor
    report: descriptor of the pipe on which the supervisor reports the end
    is_exhausted: whether the run ended because a process exceeded its restart budget; known once the run is stopped
    """

    directory: RunDirectory
    pid: int
    report: int
    is_exhausted: bool = False
    _reason: str | None = None

    def failed(self, timeout_s: float | None = 0.0) -> str | None:
        """Return the reason once the run has ended, and None while it is live.

        timeout_s: how long to wait for the end; None waits without limit
        """
        if self._reason is None and select.select([self.report], [], [], timeout_s)[0]:
            self._reason = os.read(self.report, 1 << 16).decode(errors="replace").strip() or "the run has ended"
        return self._reason

    def begin_to_stop(self) -> None:
        """Tell the run to end. When nothing is left of it, `report` becomes readable, and `stop` returns at once."""
        self._send(signal.SIGTERM)

    def stop(self) -> None:
        """End the run and wait until nothing is left of it.

        A second signal means that the user does not want to wait: the processes of the run are killed then. It is sent
        on as SIGQUIT, because a service manager sends SIGTERM to the command and to the supervisor at once.
        """
        with handle_signals(STOPPING, lambda _: self._send(HASTEN)), contextlib.suppress(ChildProcessError):
            self.begin_to_stop()
            _, status = os.waitpid(self.pid, 0)
            self.is_exhausted = os.waitstatus_to_exitcode(status) == EXHAUSTED
        if self.report >= 0:
            self._reason = self.failed() or "the run has ended"
            os.close(self.report)
            self.report = -1

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def preload(roles: Container[str] = OURS) -> None:
    """Import what these roles need, once, in the parent of all processes; without a gateway no HTTP server."""
    implementations = [implementation for role, implementation in OURS.items() if role in roles]
    for implementation in (*implementations, BACKENDS[DEFAULT_BACKEND]):
        importlib.import_module(implementation.partition(":")[0])


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
    measures_idle: bool = False,
    keeps_history: bool = False,
) -> Iterator[LiveRun]:
    """Start a run by forking its supervisor; end it with the context.

    path: the run directory; None makes a new one
    stays: the run outlives this command, unless an error leaves the context; otherwise the memory of this process
        counts in the run's
    uses: implementations that replace built-in ones
    listener: the gateway's, if the plan has a gateway
    fixed: the fixed tensors, if another run has loaded them
    measures_idle: whether the device profile is measured while the run is idle
    keeps_history: what the run counts and measures is kept for the next plan

    Raises UserError if the run cannot be started.

    Signals are blocked until there is something to stop, so that Ctrl-C cannot leave a run without an owner.
    """
    _require_open_files(len(plan.compute.processes))
    preload({spec.role for spec in plan.compute.processes})
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOPPING, HASTEN))
    with _frozen_heap():
        try:
            live = _fork(
                package, plan, path, stays, uses or Implementations(), listener, fixed, measures_idle, keeps_history
            )
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)  # signals that were blocked are raised here
                yield live
            except BaseException:
                live.stop()
                raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if not stays:
            live.stop()


@contextlib.contextmanager
def _frozen_heap() -> Iterator[None]:
    """Keep the garbage collector from objects that the run inherits: it writes to each, which copies shared pages."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _require_open_files(processes: int) -> None:
    """Raise the limit of open files to what a run needs. Raises UserError if that is not allowed.

    Otherwise a process would fail later with a less clear error, and without a free descriptor not even a folder can be
    removed.
    """
    needed_files = MIN_OPEN_FILES + OPEN_FILES_PER_PROCESS * processes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed_files:
        if hard != resource.RLIM_INFINITY and hard < needed_files:
            raise UserError(
                f"a run needs {needed_files} open files, and the limit is {hard}; raise it with `ulimit -n 1024`"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed_files, hard))


def _fork(
    package: Package,
    plan: Plan,
    path: Path | None,
    stays: bool,
    uses: Implementations,
    listener: Listener | None,
    fixed: Segment | None,
    measures_idle: bool,
    keeps_history: bool,
) -> LiveRun:
    directory = RunDirectory.create(path)
    client = os.getpid()
    try:
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
    except OSError as error:
        directory.remove()
        raise UserError(f"the run's supervisor cannot be started: {error.strerror}; see `ulimit -a`") from None
    if pid == 0:
        os.setsid()
        if stays:
            _detach()
        inherited = {0, 1, 2, write_end, *([] if listener is None else [listener.descriptor])}
        close_descriptors(lambda number, target: number not in inherited and target.startswith(("pipe:", "socket:")))
        watched = () if stays else (client,)
        supervise(
            directory,
            package,
            plan,
            write_end,
            watched,
            uses,
            listener,
            fixed,
            measures_idle=measures_idle,
            keeps_history=keeps_history,
        )
    os.close(write_end)
    directory.release()
    return LiveRun(directory, pid, read_end)


def supervise(
    directory: RunDirectory,
    package: Package,
    plan: Plan,
    report: int,
    watched: tuple[int, ...],
    uses: Implementations,
    listener: Listener | None = None,
    fixed: Segment | None = None,
    *,
    measures_idle: bool = False,
    keeps_history: bool = False,
) -> None:
    """Be the supervisor of a run, in a forked child. Never returns.

    report: pipe that gets the reason if the run cannot start or go on; it is closed when the run has ended
    """
    message, status = "", 1
    try:
        lib.np_process_name(b"np-supervisor")
        supervisor = Supervisor(
            directory,
            package,
            plan,
            watched,
            uses,
            listener,
            fixed,
            report,
            measures_idle=measures_idle,
            keeps_history=keeps_history,
        )
        supervisor.run()
        message, status = supervisor.failure or "", EXHAUSTED if supervisor.is_exhausted else 1
    except UserError as error:
        message = str(error)
        directory.remove()
    except OSError as error:
        message = f"{error.filename or directory.path}: {error.strerror}; the run was ended"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message += ": make room, or set TMPDIR to another folder"
        directory.remove()
    except BaseException:
        message = f"the supervisor failed: {traceback.format_exc()}"
        directory.remove()
    finally:
        with contextlib.suppress(BrokenPipeError):  # the command that started a run with `up` has ended
            os.write(report, message.encode())
        os._exit(status if message else 0)


@contextlib.contextmanager
def handle_signals(numbers: tuple[signal.Signals, ...], handler: Callable[[int], object]) -> Iterator[None]:
    """Call `handler` with the numbers of these signals within the context; an ignored signal stays ignored."""
    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, handled)
    before = {number: signal.signal(number, lambda number, _: handler(number)) for number in handled}
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        for number, previous in before.items():
            signal.signal(number, previous)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _detach() -> None:
    """Detach from the terminal: a run that stays must not keep the shell's pipes open."""
    null = os.open(os.devnull, os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(null, target)
