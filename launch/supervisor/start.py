"""A run started by this command: the forked supervisor, and how to stop it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import os
import resource
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from neuronpipe.launch.supervisor.logs import close_descriptors
from neuronpipe.launch.supervisor.supervisor import HASTEN, OVERCOME, STOPPING, Supervisor, preload
from neuronpipe.native import lib
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Plan
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.run_directory import RunDirectory
from neuronpipe.protocol.segments import Segment
from neuronpipe.services.runtime.implementations import Implementations
from neuronpipe.services.runtime.listener import Listener

MIN_OPEN_FILES, OPEN_FILES_PER_PROCESS = 64, 4


@dataclasses.dataclass
class LiveRun:
    """The supervisor's process and the pipe on which it reports. overcome: it has ended because a process died too
    often, known when the run was stopped."""

    directory: RunDirectory
    pid: int
    report: int
    overcome: bool = False
    _reason: str | None = None

    def failed(self, timeout_s: float | None = 0.0) -> str | None:
        """The reason when the run is over; None while it lives. timeout_s: how long to wait for it; None: for ever."""
        if self._reason is None and select.select([self.report], [], [], timeout_s)[0]:
            self._reason = os.read(self.report, 1 << 16).decode(errors="replace").strip() or "the run has ended"
        return self._reason

    def begin_to_stop(self) -> None:
        """Tell the run to end. When nothing of it is left, `report` can be read; `stop` is then done at once."""
        self._send(signal.SIGTERM)

    def stop(self) -> None:
        """End the run and wait until nothing of it is left. A second signal means that the user does
        not want to wait: then the run's processes are killed, and this waits for their end."""
        with answered(STOPPING, lambda _: self._send(HASTEN)), contextlib.suppress(ChildProcessError):
            self.begin_to_stop()
            _, status = os.waitpid(self.pid, 0)
            self.overcome = os.waitstatus_to_exitcode(status) == OVERCOME
        if self.report >= 0:
            self._reason = self.failed() or "the run has ended"
            os.close(self.report)
            self.report = -1

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


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
    _require_open_files(len(plan.compute.processes))
    preload({spec.role for spec in plan.compute.processes})
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOPPING, HASTEN))
    with _inherited_untouched():
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


@contextlib.contextmanager
def _inherited_untouched() -> Iterator[None]:
    """While the run lives, this process's collector leaves alone what the run inherits: it would write to every object,
    and so copy the pages that both share."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _require_open_files(processes: int) -> None:
    """Raise the limit to what a run needs. Raises UserError when it cannot be: some process would fail later, less
    clearly, and without a descriptor a folder cannot even be removed."""
    needed = MIN_OPEN_FILES + OPEN_FILES_PER_PROCESS * processes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise UserError(f"a run needs {needed} open files, and the limit is {hard}; raise it with `ulimit -n 1024`")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


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
        kept = {0, 1, 2, write_end, *([] if listener is None else [listener.descriptor])}
        close_descriptors(lambda number, target: number not in kept and target.startswith(("pipe:", "socket:")))
        supervise(directory, package, plan, write_end, () if stays else (client,), uses, listener, fixed)
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
) -> None:
    """Be the supervisor of a run in a forked child. `report`: pipe that gets the reason when the run could not be, or
    could not go on; its end means that the run is over. Never returns."""
    message, status = "", 1
    try:
        lib.np_process_name(b"np-supervisor")
        supervisor = Supervisor(directory, package, plan, watched, uses, listener, fixed, report)
        supervisor.run()
        message, status = supervisor.failure or "", OVERCOME if supervisor.overcome else 1
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
        with contextlib.suppress(BrokenPipeError):  # the command that started a run that stays has long ended
            os.write(report, message.encode())
        os._exit(status if message else 0)


@contextlib.contextmanager
def answered(numbers: tuple[signal.Signals, ...], answer: Callable[[int], object]) -> Iterator[None]:
    """Call `answer` with the number of each of these signals, whatever else they do; one that is ignored stays so."""
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    before = {number: signal.signal(number, lambda number, _: answer(number)) for number in heard}
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, heard)
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _detach() -> None:
    """Let go of the terminal: a run that stays must not keep the shell's pipes open."""
    null = os.open(os.devnull, os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(null, target)
